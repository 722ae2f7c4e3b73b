"""Orders by list scheduling: a free rank takes, of the steps that are ready, the one its policy prefers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import mul
from random import Random

from pipefit.spec.plan import Figures
from pipefit.synthesize.order_problem import BACKWARD, FORWARD, INPUT, WEIGHT, Order, OrderProblem

Timed = list[tuple[float, int]]
"""Times, each with its rank or its step."""


@dataclass(frozen=True)
class Policy:
    """The preferences of ranks.

    Attributes:
        eager: whether each rank takes a forward before the first half of a backward.
        room: the memory that each rank uses.
        group: micro-batches that go through one stage of a rank before its next stage.
        patience: a fraction of a second half's time: a rank waits instead of starting that half where other work
            arrives within it.
    """

    eager: tuple[bool, ...]
    room: Figures
    group: int
    patience: float


def policies(problem: OrderProblem) -> Iterator[Policy]:
    """Policies of the known schedules, and variants of these."""
    ranks = len(problem.stages)
    count = problem.num_microbatches
    each = [sum(map(problem.size_of, stages)) for stages in problem.stages]
    most = [min(room, count * size) for room, size in zip(problem.room, each, strict=True)]
    ahead = [ranks - rank for rank in range(ranks)]
    rooms = [tuple(most)]
    for depths in (ahead, [2 * depth - 1 for depth in ahead], [ranks] * ranks):
        held = map(mul, depths, each)
        rooms.append(tuple(map(min, most, held)))
    groups = [1]
    if problem.header.num_chunks > 1:
        groups = list(dict.fromkeys((1, ranks, count)))
    patiences = [0.0]
    if problem.split:
        patiences += [0.5, 1.0]
    for group, room, patience, eager in product(groups, dict.fromkeys(rooms), patiences, (True, False)):
        yield Policy((eager,) * ranks, room, group, patience)


def nearby(policy: Policy, problem: OrderProblem, random: Random) -> Policy:
    """A policy that differs in one rank's preference, or in the patience of all."""
    rank = random.randrange(len(policy.room))
    what = random.randrange(4)
    if what == 0:
        return replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    if what == 1:
        eager = list(policy.eager)
        eager[rank] = not eager[rank]
        return replace(policy, eager=tuple(eager))
    size = max(map(problem.size_of, problem.stages[rank]))
    room = list(policy.room)
    more = random.choice((-2, -1, 1, 2)) * size
    wanted = room[rank] + more
    room[rank] = max(min(wanted, problem.room[rank]), size)
    return replace(policy, room=tuple(room))


def listed(problem: OrderProblem, policy: Policy) -> Order | None:
    """The order of a policy; None: no micro-batch fits into memory."""
    board = _Board(problem, policy)
    events = [(0.0, rank) for rank in range(len(problem.stages))]
    while events:
        now, rank = heapq.heappop(events)
        if now < board.free[rank]:
            continue
        coming = board.coming(rank)
        step = board.choice(rank, now, coming)
        if step is not None:
            found = board.take(rank, step, now)
        else:
            later = [(time, rank) for time, _ in coming if time > now]
            found = sorted(later)[:1]
        for event in found:
            heapq.heappush(events, event)
    kinds = 2 + problem.split
    if sum(map(len, board.order)) < kinds * board.count * problem.num_microbatches:
        return None
    return board.order


class _Board:
    """The work done so far.

    Attributes:
        free: when each rank is free again.
        held: memory of each rank.
        done: steps so far: forwards, then first halves (or whole backwards), then second halves.
        arrived: the time at which the input of each forward and backward is on its rank.
        order: the steps of each rank.
    """

    def __init__(self, problem: OrderProblem, policy: Policy) -> None:
        ranks = len(problem.stages)
        count = problem.header.num_stages
        self.problem = problem
        self.policy = policy
        self.count = count
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        self.done = [0] * (3 * count)
        self.arrived: list[list[float]] = [[] for _ in range(2 * count)]
        self.arrived[0] = [0.0] * problem.num_microbatches
        self.order: Order = [[] for _ in range(ranks)]
        self.size = list(map(problem.size_of, range(count)))
        self.feeds = {source: step for step, (source, _) in enumerate(problem.feeds[: 2 * count])}

    def pending(self, stage: int) -> int:
        """Second halves of a stage still to do."""
        if self.problem.split:
            done = self.done[stage :: self.count]
            return done[INPUT] - done[WEIGHT]
        return 0

    def coming(self, rank: int) -> Timed:
        """Known start times of each next forward and backward of a rank, where its memory suffices."""
        found = []
        for stage in self.problem.stages[rank]:
            for step in (stage, self.count + stage):
                turn = self.done[step]
                arrived = self.arrived[step]
                if turn < len(arrived) and (step != stage or self._has_room(rank, stage)):
                    found.append((arrived[turn], step))
        return found

    def _has_room(self, rank: int, stage: int) -> bool:
        """Returns whether a forward fits in addition to the rest of the oldest micro-batch; so no rank gets stuck."""
        stages = self.problem.stages[rank]
        last = self.count
        if self.problem.split:
            last *= 2
        oldest = min(self.done[last + s] for s in stages)
        rest = 0.0
        if self.done[stage] > oldest:
            rest = sum(self.size[s] for s in stages if self.done[s] <= oldest)
        held = self.held[rank] + self.size[stage] + rest
        return held <= self.policy.room[rank]

    def choice(self, rank: int, now: float, coming: Timed) -> int | None:
        """Returns the next step of a rank; None: it waits."""
        there = [step for time, step in coming if time <= now]
        if there:
            eager = self.policy.eager[rank]
            return min(there, key=lambda step: self._rank_of(step, eager))
        stage = max(self.problem.stages[rank], key=lambda s: (self.pending(s), s))
        half = WEIGHT * self.count + stage
        patience_s = self.policy.patience * self.problem.seconds[half]
        next_s = min((time for time, _ in coming), default=math.inf)
        if self.pending(stage) and next_s >= now + patience_s:
            return half
        return None

    def _rank_of(self, step: int, eager: bool) -> tuple[bool, int, int]:
        kind, stage = divmod(step, self.count)
        group = self.done[step] // self.policy.group
        if kind == FORWARD:
            return not eager, group, stage
        return eager, group, -stage

    def take(self, rank: int, step: int, now: float) -> Timed:
        """Runs a step; returns the times at which ranks may have new work."""
        problem = self.problem
        kind, stage = divmod(step, self.count)
        whole = kind == INPUT and not problem.split
        done = step
        if whole:
            done = BACKWARD * self.count + stage
        end = self.free[rank] = now + problem.seconds[done]
        self.order[rank].append(done)
        self.done[step] += 1
        if kind == FORWARD:
            self.held[rank] += self.size[stage]
        elif kind == WEIGHT or whole:
            self.held[rank] -= self.size[stage]
        events = [(end, rank)]
        if step in self.feeds:
            fed = self.feeds[step]
            target = problem.home[fed % self.count]
            arrival = end + problem.feeds[fed][1]
            self.arrived[fed].append(arrival)
            events.append((arrival, target))
        return events
