"""Rules `dependencies`, `use-after-free` and `deadlock`: the values an instruction needs are there when it runs."""

from __future__ import annotations

from bisect import bisect_left

from pipefit.ir.blocking import Blocking
from pipefit.ir.op import Op
from pipefit.ir.values import MAKES, Value
from pipefit.verify.subject import Findings, Places, Subject


def dependencies(s: Subject) -> Findings:
    """Needed values that nothing on the rank makes in time; and replays that come before their forward."""
    made = {}
    if s.graph.missing:
        made = s.places_of(MAKES)
    for number, value in s.graph.missing:
        if _last_gone(s, number, value) is None:
            why = _later_maker(s, made, number, value)
            yield s.at("dependencies", number, f"needs {value}, which {why}")
    # A replay uses the random numbers that its forward drew, which are not a value.
    ranks = s.graph.ranks
    for stage, mb, number in s.each(Op.RECOMPUTE):
        forward = s.places[Op.FWD].get((stage, mb), [number])[0]
        if number < forward and ranks[number] == ranks[forward]:
            later = s.where(forward)
            yield s.at("dependencies", number, f"replays a forward that comes later: {later}")


def use_after_free(s: Subject) -> Findings:
    """Needed values that were there but have been consumed, dropped or evicted."""
    for number, value in s.graph.missing:
        gone = _last_gone(s, number, value)
        if gone is not None:
            yield s.at("use-after-free", number, f"needs {value}, which is gone since {s.where(gone)}")


def deadlock(s: Subject) -> Findings:
    """Every cycle of ranks that wait for each other, as a list, under blocking execution (`pipefit.ir.blocking`)."""
    run = Blocking(s.graph)
    stuck = run.run()
    for cycle in run.cycles(stuck):
        lines = ["these wait for each other:"]
        for rank in cycle:
            number = stuck[rank]
            _, index = s.place(number)
            text = s.graph.instructions[number]
            awaited = s.where(run.waits_for(number))
            lines.append(f"      rank {rank} waits at [{index}] {text}, for {awaited}")
        first = stuck[cycle[0]]
        yield s.at("deadlock", first, "\n".join(lines))


def _last_gone(s: Subject, number: int, value: Value) -> int | None:
    """The last earlier instruction of the rank that consumed a value."""
    rank = s.graph.ranks[number]
    found = s.gone.get((rank, value), ())
    position = bisect_left(found, number)
    if position:
        return found[position - 1]
    return None


def _later_maker(s: Subject, made: Places, number: int, value: Value) -> str:
    rank = s.graph.ranks[number]
    found = made.get((rank, value), ())
    position = bisect_left(found, number)
    if position == len(found):
        return "nothing on this rank makes"
    return f"is made only later: {s.where(found[position])}"
