"""Orders by list scheduling: a free rank takes, of the steps that are ready, the one its policy prefers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from pipefit.synthesize.order_problem import BACKWARD, FORWARD, INPUT, WEIGHT, Order, OrderProblem


@dataclass(frozen=True)
class Policy:
    """The preferences of ranks.

    Attributes:
        eager: of each rank, whether it takes a forward before the first half of a backward.
        room: of each rank, the memory that it uses.
        group: micro-batches that go through one stage of a rank before the next stage has its turn.
        patience: a rank rather waits than fills its time with a second half where other work is there before so much
            of that half is done.
    """

    eager: tuple[bool, ...]
    room: tuple[float, ...]
    group: int
    patience: float


def policies(problem: OrderProblem) -> Iterator[Policy]:
    """Policies that the known schedules follow, and their relatives."""
    ranks, count = len(problem.stages), problem.num_microbatches
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
    """The order of a policy; None: no micro-batch finds room."""
    board = _Board(problem, policy)
    events = [(0.0, rank) for rank in range(len(problem.stages))]
    while events:
        now, rank = heapq.heappop(events)
        if now < board.free[rank]:
            continue
        step = board.choice(rank, now)
        if step is None:
            later = [time for time, _ in board.coming(rank, now) if time > now]
            if later:
                heapq.heappush(events, (min(later), rank))
            continue
        for event in board.take(rank, step, now):
            heapq.heappush(events, event)
    full = all(done == problem.num_microbatches for done in board.done[: 2 * problem.header.num_stages])
    return board.order if full and not any(board.pending) else None


@dataclass
class _Board:
    """The work done so far."""

    problem: OrderProblem
    policy: Policy
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    done: list[int] = field(init=False)
    arrived: list[list[float]] = field(init=False)
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        ranks, count = len(self.problem.stages), self.problem.header.num_stages
        self.free, self.held, self.order = [0.0] * ranks, [0.0] * ranks, [[] for _ in range(ranks)]
        # Forwards, then first halves (or whole backwards), then second halves.
        self.done = [0] * (3 * count)
        # When what each forward and each backward needs is on its rank.
        self.arrived = [[] for _ in range(2 * count)]
        self.arrived[0] = [0.0] * self.problem.num_microbatches

    @property
    def pending(self) -> list[int]:
        """Second halves still to do, by stage."""
        count = self.problem.header.num_stages
        return [self.done[count + s] - self.done[2 * count + s] if self.problem.split else 0 for s in range(count)]

    def coming(self, rank: int, now: float) -> list[tuple[float, int]]:
        """Known start times of each next forward and backward of a rank, if there is room for it."""
        count = self.problem.header.num_stages
        found = []
        for stage in self.problem.stages[rank]:
            for step in (stage, count + stage):
                turn = self.done[step]
                if turn < len(self.arrived[step]) and (step >= count or self._has_room(rank, stage)):
                    found.append((self.arrived[step][turn], step))
        return found

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether a forward fits in addition to the rest of the oldest micro-batch: so nothing is ever stuck."""
        problem, stages = self.problem, self.problem.stages[rank]
        last = 2 if problem.split else 1
        oldest = min(self.done[last * problem.header.num_stages + s] for s in stages)
        sizes = [problem.takes[s] + (problem.halves[s] if problem.split else 0) for s in stages]
        rest = 0.0
        if self.done[stage] > oldest:
            rest = sum(size for s, size in zip(stages, sizes, strict=True) if self.done[s] <= oldest)
        return self.held[rank] + sizes[stages.index(stage)] + rest <= self.policy.room[rank]

    def choice(self, rank: int, now: float) -> int | None:
        """Returns the next step of a rank; None: it waits."""
        count, policy = self.problem.header.num_stages, self.policy
        coming = self.coming(rank, now)
        there = [step for time, step in coming if time <= now]
        if there:
            return min(there, key=lambda step: self._rank_of(step, policy.eager[rank]))
        waiting = [stage for stage in self.problem.stages[rank] if self.pending[stage]]
        if not waiting:
            return None
        stage = max(waiting, key=lambda s: (self.pending[s], s))
        until = now + policy.patience * self.problem.seconds[WEIGHT * count + stage]
        return None if any(time < until for time, _ in coming) else WEIGHT * count + stage

    def _rank_of(self, step: int, eager: bool) -> tuple[bool, int, int]:
        kind, stage = divmod(step, self.problem.header.num_stages)
        forward = kind == FORWARD
        return forward != eager, self.done[step] // self.policy.group, stage if forward else -stage

    def take(self, rank: int, step: int, now: float) -> list[tuple[float, int]]:
        """Does a step; gives the times at which ranks may have something to do."""
        problem, count = self.problem, self.problem.header.num_stages
        kind, stage = divmod(step, count)
        whole = kind == INPUT and not problem.split
        step = BACKWARD * count + stage if whole else step
        end = now + problem.seconds[step]
        self.free[rank] = end
        self.order[rank].append(step)
        self.done[kind * count + stage] += 1
        size = problem.takes[stage] + (problem.halves[stage] if problem.split else 0)
        if kind == FORWARD:
            self.held[rank] += size
        elif kind == WEIGHT or whole:
            self.held[rank] -= size
        events = [(end, rank)]
        if kind != WEIGHT:
            last = stage == count - 1
            target = (stage if last else stage + 1) if kind == FORWARD else stage - 1
            feeds = count + stage if kind == FORWARD and last else target if kind == FORWARD else count + target
            if target >= 0:
                arrival = end + problem.feeds[feeds][1]
                self.arrived[feeds].append(arrival)
                events.append((arrival, problem.home[target]))
        return events
