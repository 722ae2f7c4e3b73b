"""Memory over time: the lifetimes of liveness, with simulated times."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pipefit.cost.model import CostModel
from pipefit.ir.liveness import arena_bytes, lies_in_slot, lifetimes
from pipefit.ir.op import WORK_OPS
from pipefit.ir.program import Program
from pipefit.ir.values import Value

if TYPE_CHECKING:
    from pipefit.simulate.event_engine import EventEngine

Samples = tuple[tuple[float, float], ...]


def memory_over_time(program: Program, cost: CostModel, engine: EventEngine) -> tuple[Samples, ...]:
    """For each rank, (time_s, bytes) at every change of its memory, beginning with the bytes at the start.

    A value takes memory from the start of the instruction that makes it (a receive: from posting) to the end of the
    last one that needs it (a send: until its message has arrived). At equal times, values are freed before others are
    made. The slots of spilled stages are there throughout.
    """
    ranks = range(len(program.ranks))
    return tuple(_rank_memory(program, cost, engine, rank) for rank in ranks)


def _rank_memory(program: Program, cost: CostModel, engine: EventEngine, rank: int) -> Samples:
    starts = engine.layout.graph.starts
    first = starts[rank]
    size = starts[-1]
    count = starts[rank + 1] - starts[rank]
    header = program.header
    lives = lifetimes(program, rank)
    if header.spill is not None:
        lives = [life for life in lives if not lies_in_slot(header, life.value)]
    # The same for all micro-batches and versions.
    held_bytes = cache(lambda kind, stage: cost.held_bytes(Value(kind, stage, 0)))
    sized = []
    for life in lives:
        amount = held_bytes(life.value.kind, life.value.stage)
        if amount:
            sized.append((life.born, life.dies, amount))
    work = [index for index, i in enumerate(program.ranks[rank]) if i.op in WORK_OPS]
    last = max(work, default=-1)
    changes: dict[float, float] = {}
    seam: float = 0
    for lap in range(engine.repeats):
        base = lap * size + first
        if last >= 0:
            after = engine.end[base + last]
        else:
            after = seam
        for born, dies, amount in sized:
            # Values held at the start of a pass are those held at the end of the pass before.
            if born < 0:
                begin = seam
            elif born < count:
                begin = engine.start[base + born]
            else:
                begin = after
            if dies >= count:
                end = after
            else:
                end = engine.end[base + dies]
            if begin < end:
                changes[begin] = changes.get(begin, 0) + amount
                changes[end] = changes.get(end, 0) - amount
        seam = after
    # Slots are there throughout, full or empty; the states of an optimizer too, unless they move through slots.
    if header.spill:
        held = arena_bytes(header, rank, cost.size_bytes)
    else:
        held = 0
    held += cost.staying_bytes(header, rank)
    for stage in header.stages_of(rank):
        if not header.is_spilled(stage):
            held += cost.frozen_bytes(stage)
    if 0 in changes:
        samples: list[tuple[float, float]] = []
    else:
        samples = [(0, held)]
    # Values held after the last pass stay.
    staying = [amount for _, dies, amount in sized if dies >= count]
    changes[seam] = changes.get(seam, 0) + sum(staying)
    for time in sorted(changes):
        if changes[time] or time == 0:
            held += changes[time]
            samples.append((time, held))
    return tuple(samples)
