"""The number of messages of a link that are sent before their receives are posted."""

from __future__ import annotations

from bisect import bisect_right, insort

from pipefit.cost import unit
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.simulate.simulate import simulate


def most_unposted(program: Program) -> int:
    """Maximum number of messages of one kind that a rank has sent before the other rank posts their receives.

    Computed under unit costs. A sender that allows fewer would wait for a rank that has other work to do first.

    >>> from pipefit.schedules import Shape, generate
    >>> most_unposted(generate("1f1b", Shape(depth=2, num_microbatches=8)))
    0
    >>> most_unposted(generate("breadth-first", Shape(depth=2, num_microbatches=8, num_chunks=2)))
    5
    """
    timeline = simulate(program, unit(program.header), memory=False)
    posted = {}
    sent = []
    for event in timeline.events:
        i = timeline.instruction(event)
        if i.op is Op.RECV:
            posted[i.peer, event.rank, i.kind, i.stage, i.mb] = event.start_s
        elif i.op is Op.SEND:
            sent.append((event.start_s, (event.rank, i.peer, i.kind, i.stage, i.mb)))
    waiting: dict[tuple[int, int, str], list[float]] = {}
    most = 0
    for start_s, message in sorted(sent):
        queue = waiting.setdefault(message[:3], [])
        del queue[: bisect_right(queue, start_s)]
        if posted[message] > start_s:
            insort(queue, posted[message])
        most = max(most, len(queue))
    return most
