"""Rules `dependencies`, `use-after-free` and `deadlock`: the values an instruction needs are there when it runs."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.ir.blocking import Blocking
from pipefit.ir.op import Op
from pipefit.ir.values import Value, consumes, makes
from pipefit.verify.subject import Finding, Subject


def dependencies(s: Subject) -> Iterator[Finding]:
    """Needed values that nothing on the rank makes in time; and replays that come before their forward."""
    for number, value in s.graph.missing:
        if _last_gone(s, number, value) is None:
            yield s.at("dependencies", number, f"needs {value}, which {_later_maker(s, number, value)}")
    # A replay uses the random numbers that its forward drew, which are not a value.
    for key, numbers in s.places[Op.RECOMPUTE].items():
        forwards = s.places[Op.FWD].get(key, [])
        for number in numbers:
            if forwards and number < forwards[0] and s.graph.ranks[number] == s.graph.ranks[forwards[0]]:
                yield s.at("dependencies", number, f"replays a forward that comes later: {s.where(forwards[0])}")


def use_after_free(s: Subject) -> Iterator[Finding]:
    """Needed values that were there but have been consumed, dropped or evicted."""
    for number, value in s.graph.missing:
        gone = _last_gone(s, number, value)
        if gone is not None:
            yield s.at("use-after-free", number, f"needs {value}, which is gone since {s.where(gone)}")


def deadlock(s: Subject) -> Iterator[Finding]:
    """Every cycle of ranks that wait for each other, as a list, under blocking execution (`pipefit.ir.blocking`)."""
    run = Blocking(s.graph)
    stuck = run.run()
    for cycle in run.cycles(stuck):
        lines = ["these wait for each other:"]
        for rank in cycle:
            _, index = s.place(stuck[rank])
            text = s.graph.instructions[stuck[rank]]
            lines.append(f"      rank {rank} waits at [{index}] {text}, for {s.where(run.waits_for(stuck[rank]))}")
        yield s.at("deadlock", stuck[cycle[0]], "\n".join(lines))


def _last_gone(s: Subject, number: int, value: Value) -> int | None:
    """The last earlier instruction of the rank that consumed a value."""
    start = s.graph.starts[s.graph.ranks[number]]
    for earlier in range(number - 1, start - 1, -1):
        if value in consumes(s.graph.instructions[earlier], s.program, s.graph.ranks[number]):
            return earlier
    return None


def _later_maker(s: Subject, number: int, value: Value) -> str:
    rank = s.graph.ranks[number]
    for later in range(number, s.graph.starts[rank + 1]):
        if value in makes(s.graph.instructions[later], s.program, rank):
            return f"is made only later: {s.where(later)}"
    return "nothing on this rank makes"
