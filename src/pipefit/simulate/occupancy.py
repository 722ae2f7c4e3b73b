"""Memory over time: the lifetimes of liveness, with simulated times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from pipefit.cost.model import CostModel
from pipefit.ir.liveness import arena_bytes, lies_in_slot
from pipefit.ir.op import MESSAGE_OPS, WORK_OPS
from pipefit.ir.program import Program
from pipefit.ir.values import Value
from pipefit.timeline.timeline import Timeline

Samples = tuple[tuple[float, float], ...]


class Stay(NamedTuple):
    """A value on a rank from one time to another (None: it is still there at the end); None: what is always there."""

    value: Value | None
    start_s: float
    end_s: float | None
    size_bytes: float


def memory_over_time(timeline: Timeline, cost: CostModel) -> tuple[Samples, ...]:
    """For each rank, (time_s, bytes) at every change of its memory, beginning with the bytes at the start.

    A value takes memory from the start of the instruction that makes it (a receive: from posting) to the end of the
    last one that needs it (a send: until its message has arrived). At equal times, values are freed before others are
    made. The slots of spilled stages are there throughout.
    """
    ranks = range(len(timeline.program.ranks))
    return tuple(_samples(stays_of(timeline, cost, rank)) for rank in ranks)


def stays_of(timeline: Timeline, cost: CostModel, rank: int) -> Iterator[Stay]:
    """The values that a rank holds, with their times: what is always there as one, then all that are in no slot."""
    program = timeline.program
    yield Stay(None, 0, None, _staying_bytes(program, cost, rank))
    header = program.header
    instructions = program.ranks[rank]
    count = len(instructions)
    lives = cost.lifetimes(program, rank)
    if header.spill is not None:
        lives = [life for life in lives if not lies_in_slot(header, life.value)]
    # The same for all micro-batches and versions.
    held_bytes = cache(lambda kind, stage: cost.held_bytes(Value(kind, stage, 0)))
    sized = []
    for life in lives:
        amount = held_bytes(life.value.kind, life.value.stage)
        if amount:
            sized.append((life.value, life.born, life.dies, amount))
    last = max((index for index, i in enumerate(instructions) if i.op in WORK_OPS), default=-1)
    issued = set()
    if cost.work_bytes:
        # The end of a message that is held by its sender, for which nothing waits, is not its arrival.
        issued = {index for index, i in enumerate(instructions) if i.op in MESSAGE_OPS}
    events = timeline.by_place
    seam: float = 0
    for lap in range(timeline.num_repeats):
        after = seam
        if last >= 0:
            after = events[rank, lap, last].end_s
        for value, born, dies, amount in sized:
            # Values held at the start of a pass are those held at the end of the pass before.
            if born < 0:
                begin = seam
            elif born < count:
                begin = events[rank, lap, born].start_s
            else:
                begin = after
            if dies >= count and lap == timeline.num_repeats - 1:
                yield Stay(value, begin, None, amount)
                continue
            if dies >= count:
                end = after
            elif dies in issued:
                end = events[rank, lap, dies].start_s
            else:
                end = events[rank, lap, dies].end_s
            if begin < end:
                yield Stay(value, begin, end, amount)
        seam = after


def _staying_bytes(program: Program, cost: CostModel, rank: int) -> float:
    """Bytes of a rank that are there throughout: slots, full or empty, and states of optimizers that do not move."""
    header = program.header
    held = cost.staying_bytes(header, rank)
    if header.spill:
        held += arena_bytes(header, rank, cost.size_bytes)
    for stage in header.stages_of(rank):
        if not header.is_spilled(stage):
            held += cost.frozen_bytes(stage)
    return held


def _samples(stays: Iterable[Stay]) -> Samples:
    changes: dict[float, float] = {}
    for stay in stays:
        changes[stay.start_s] = changes.get(stay.start_s, 0) + stay.size_bytes
        if stay.end_s is not None:
            changes[stay.end_s] = changes.get(stay.end_s, 0) - stay.size_bytes
    held: float = 0
    samples = []
    for time in sorted(changes):
        if changes[time] or time == 0:
            held += changes[time]
            samples.append((time, held))
    return tuple(samples)
