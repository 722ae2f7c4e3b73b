"""The order of a pipeline whose stages have different numbers of copies, such as one that has lost a rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from pipefit.ir.instruction import Indices, Instruction, bwd, bwd_input, bwd_weight, fwd
from pipefit.ir.program import WeightRule
from pipefit.schedules.registry import Orders, Schedule, Task

_OPTIONS = {"held": 0, "eager": 0, "split": 1, "forward": 1, "input": 1, "weight": 1}


def _patched(task: Task) -> Orders:
    """Patched: siblings of a lost rank run its micro-batches in their bubbles, weight halves of backwards last.

        F0 F1 F2 F3 .  I0 I1 I2 I3 W0 W1 W2 W3   rank 0: the first stage, which has lost a copy
        .  F0 .  F2 I0 W0 I2 W2 .  .  .  .  .    rank 1
        .  .  F0 I0 F2 I2 W0 W2 .  .  .  .  .    rank 2
        .  .  F1 .  F3 I1 W1 I3 W3 .  .  .  .    rank 3
        .  .  .  F1 I1 F3 I3 W1 W3 .  .  .  .    rank 4

    F forward, I and W the halves of a backward for inputs and for weights, digits micro-batches; drawn for f = i = w.
    Each rank takes, of the work that has arrived, a backward before a forward, and the earliest micro-batch of several;
    where nothing has arrived, a weight half. Option `eager` 1 prefers forwards; `held` sets the micro-batches that a
    rank may hold (0: all); `split` 0 keeps backwards whole; `forward`, `input` and `weight` are the times by which the
    order is found.
    Where d copies of a pipeline have m micro-batches each and one rank of stage s is lost, no order takes less than
    s·f + ⌈md/(d−1)⌉(f+i+w): a sibling cannot begin earlier, and has as much work.
    Source: ReCycle (SOSP 2024), for siblings that take over the work, and for halves of backwards; not for the order.
    """
    board = _Board(task)
    board.run()
    for own in board.ranks:
        assert not own.arrived, "a rank stands still"
        yield own.order


NAME = "patched"
SCHEDULE = Schedule(NAME, _patched, WeightRule.FLUSH, chunks=True, options=_OPTIONS)
"""A schedule for a placement that is given; no plan is searched with it, so it is not among the registered ones."""


_Work = tuple[bool, int, int, bool]
"""A forward or backward: whether the other kind precedes it, its micro-batch, its stage, whether it is a forward."""


@dataclass
class _Rank:
    """The state of one rank.

    Attributes:
        stages: its stages, starting from the input.
        arrived: the forwards and backwards whose input is there.
        halves: stage and micro-batch of the second halves that are left.
        held: forwards whose backward has not ended, of all its stages.
        free_at: the time at which it is free again.
    """

    stages: Indices
    arrived: list[_Work] = field(default_factory=list)
    halves: list[tuple[int, int]] = field(default_factory=list)
    order: list[Instruction] = field(default_factory=list)
    held: int = 0
    free_at: int = 0

    def has_room(self, work: _Work, most: int) -> bool:
        """Returns whether work can start; every forward leaves room for one of each later stage, so none gets stuck."""
        _, _, stage, is_forward = work
        if not is_forward or not most:
            return True
        later = len(self.stages) - 1 - self.stages.index(stage)
        return self.held + later < most * len(self.stages)


class _Board:
    """All ranks, and the work on its way to them.

    Attributes:
        events: times at which a rank gets work, or is free again (None).
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seconds = task.options
        self.ranks = [_Rank(task.stages_of(rank)) for rank in range(task.num_ranks)]
        self.events: list[tuple[int, int, _Work | tuple[()]]] = []

    def run(self) -> None:
        """Runs all work."""
        for mb in self.task.span:
            self._send(0, 0, mb, is_forward=True)
        while self.events:
            now = self.events[0][0]
            awake = set()
            while self.events and self.events[0][0] == now:
                _, rank, work = heapq.heappop(self.events)
                awake.add(rank)
                if work:
                    self.ranks[rank].arrived.append(work)
            for rank in sorted(awake):
                if self.ranks[rank].free_at <= now:
                    self._start(rank, now)

    def _send(self, time: int, stage: int, mb: int, is_forward: bool) -> None:
        """Work reaches the rank that runs a stage for a micro-batch."""
        is_later = is_forward != bool(self.task.options["eager"])
        event = (time, self.task.header.rank_of(stage, mb), (is_later, mb, stage, is_forward))
        heapq.heappush(self.events, event)

    def _start(self, rank: int, now: int) -> None:
        """A free rank takes its next work, where it has any."""
        own = self.ranks[rank]
        fitting = [work for work in own.arrived if own.has_room(work, self.task.options["held"])]
        if fitting:
            work = min(fitting)
            own.arrived.remove(work)
            self._run(own, work, now)
        elif own.halves:
            stage, mb = own.halves.pop(0)
            own.order.append(bwd_weight(stage, mb))
            own.held -= 1
            own.free_at = now + self.seconds["weight"]
        else:
            return
        heapq.heappush(self.events, (own.free_at, rank, ()))

    def _run(self, own: _Rank, work: _Work, now: int) -> None:
        """A forward, a whole backward, or the first half of one, and what follows from it on other ranks."""
        _, mb, stage, is_forward = work
        if is_forward:
            own.order.append(fwd(stage, mb))
            own.held += 1
            own.free_at = now + self.seconds["forward"]
            if stage < self.task.num_stages - 1:
                self._send(own.free_at, stage + 1, mb, is_forward=True)
            else:
                self._send(own.free_at, stage, mb, is_forward=False)
            return
        own.free_at = now + self.seconds["input"]
        if self.task.options["split"]:
            own.order.append(bwd_input(stage, mb))
            own.halves.append((stage, mb))
        else:
            own.order.append(bwd(stage, mb))
            own.held -= 1
            own.free_at += self.seconds["weight"]
        if stage > 0:
            self._send(own.free_at, stage - 1, mb, is_forward=False)
