"""Rules `dependencies`, `use-after-free` and `deadlock`: the values an instruction needs are there when it runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pipefit.ir.blocking import Blocking
from pipefit.ir.op import Op
from pipefit.ir.values import Value, makes
from pipefit.verify.subject import Finding, Places, Subject


def dependencies(s: Subject) -> Iterator[Finding]:
    """Needed values that nothing on the rank makes in time; and replays that come before their forward."""
    made = s.places_of(makes) if s.graph.missing else {}
    for number, value in s.graph.missing:
        if _last_gone(s, number, value) is None:
            yield s.at("dependencies", number, f"needs {value}, which {_later_maker(s, made, number, value)}")
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
    found = s.gone.get((s.graph.ranks[number], value), ())
    position = bisect_left(found, number)
    return found[position - 1] if position else None


def _later_maker(s: Subject, made: Places, number: int, value: Value) -> str:
    found = made.get((s.graph.ranks[number], value), ())
    position = bisect_left(found, number)
    return f"is made only later: {s.where(found[position])}" if position < len(found) else "nothing on this rank makes"
