"""Orders by list scheduling: a free rank takes, of the steps that are ready, the one its policy prefers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from pipefit.synthesize.order_problem import BACKWARD, FORWARD, INPUT, WEIGHT, Order, OrderProblem


@dataclass(frozen=True)
class Policy:
    """The preferences of ranks.

    Attributes:
        eager: of each rank, whether it takes a forward before the first half of a backward.
        room: of each rank, the memory that it uses.
        group: micro-batches that go through one stage of a rank before its next stage.
        patience: a fraction of a second half's time: a rank waits instead of starting that half where other work
            arrives within it.
    """

    eager: tuple[bool, ...]
    room: tuple[float, ...]
    group: int
    patience: float


def policies(problem: OrderProblem) -> Iterator[Policy]:
    """Policies of the known schedules, and variants of these."""
    ranks = len(problem.stages)
    count = problem.num_microbatches
    each = [sum(problem.takes[stage] + problem.halves[stage] for stage in stages) for stages in problem.stages]
    most = [min(room, count * size) for room, size in zip(problem.room, each, strict=True)]
    ahead = [ranks - rank for rank in range(ranks)]
    depths = (ahead, [2 * depth - 1 for depth in ahead], [ranks] * ranks)
    rooms = [tuple(most)]
    rooms += [tuple(min(m, d * e) for m, d, e in zip(most, depth, each, strict=True)) for depth in depths]
    groups = dict.fromkeys((1, ranks, count)) if problem.header.num_chunks > 1 else (1,)
    for group, room, patience, eager in product(groups, dict.fromkeys(rooms), (0.0, 0.5, 1.0), (True, False)):
        if problem.split or not patience:
            yield Policy((eager,) * ranks, room, group, patience)


def nearby(policy: Policy, problem: OrderProblem, random: Random) -> Policy:
    """A policy that differs in one rank's preference, or in the patience of all."""
    rank = random.randrange(len(policy.room))
    what = random.randrange(4)
    if what == 0:
        return replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    if what == 1:
        return replace(policy, eager=tuple(e != (r == rank) for r, e in enumerate(policy.eager)))
    size = max(problem.takes[stage] + problem.halves[stage] for stage in problem.stages[rank])
    changed = max(min(policy.room[rank] + random.choice((-2, -1, 1, 2)) * size, problem.room[rank]), size)
    return replace(policy, room=tuple(changed if r == rank else room for r, room in enumerate(policy.room)))


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
            if later := [time for time, _ in coming if time > now]:
                found = [(min(later), rank)]
            else:
                found = []
        for event in found:
            heapq.heappush(events, event)
    full = all(done == problem.num_microbatches for done in board.done[: 2 * problem.header.num_stages])
    if full and not any(map(board.pending, range(problem.header.num_stages))):
        return board.order
    return None


class _Board:
    """The work done so far.

    Attributes:
        free: when each rank is free again.
        held: memory of each rank.
        done: steps so far: forwards, then first halves (or whole backwards), then second halves.
        arrived: the time at which the input of each forward and backward is on its rank.
        order: of each rank.
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
        self.size = [take + half for take, half in zip(problem.takes, problem.halves, strict=True)]
        self.feeds = {source: step for step, (source, _) in enumerate(problem.feeds[: 2 * count])}

    def pending(self, stage: int) -> int:
        """Second halves of a stage still to do."""
        if self.problem.split:
            return self.done[self.count + stage] - self.done[2 * self.count + stage]
        return 0

    def coming(self, rank: int) -> list[tuple[float, int]]:
        """Known start times of each next forward and backward of a rank, where its memory suffices."""
        found = []
        for stage in self.problem.stages[rank]:
            for step in (stage, self.count + stage):
                turn = self.done[step]
                if turn < len(self.arrived[step]) and (step >= self.count or self._has_room(rank, stage)):
                    found.append((self.arrived[step][turn], step))
        return found

    def _has_room(self, rank: int, stage: int) -> bool:
        """Returns whether a forward fits in addition to the rest of the oldest micro-batch; so no rank gets stuck."""
        stages = self.problem.stages[rank]
        last = (2 if self.problem.split else 1) * self.count
        oldest = min(self.done[last + s] for s in stages)
        if self.done[stage] > oldest:
            rest = sum(self.size[s] for s in stages if self.done[s] <= oldest)
        else:
            rest = 0.0
        return self.held[rank] + self.size[stage] + rest <= self.policy.room[rank]

    def choice(self, rank: int, now: float, coming: list[tuple[float, int]]) -> int | None:
        """Returns the next step of a rank; None: it waits."""
        there = [step for time, step in coming if time <= now]
        if there:
            return min(there, key=lambda step: self._rank_of(step, self.policy.eager[rank]))
        stage = max(self.problem.stages[rank], key=lambda s: (self.pending(s), s))
        half = WEIGHT * self.count + stage
        until = now + self.policy.patience * self.problem.seconds[half]
        if self.pending(stage) and all(time >= until for time, _ in coming):
            return half
        return None

    def _rank_of(self, step: int, eager: bool) -> tuple[bool, int, int]:
        kind, stage = divmod(step, self.count)
        forward = kind == FORWARD
        return forward != eager, self.done[step] // self.policy.group, stage if forward else -stage

    def take(self, rank: int, step: int, now: float) -> list[tuple[float, int]]:
        """Runs a step; returns the times at which ranks may have new work."""
        problem = self.problem
        (kind, stage) = divmod(step, self.count)
        whole = kind == INPUT and not problem.split
        if whole:
            done = BACKWARD * self.count + stage
        else:
            done = step
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
            arrival = end + problem.feeds[fed][1]
            self.arrived[fed].append(arrival)
            events.append((arrival, problem.home[fed % self.count]))
        return events
