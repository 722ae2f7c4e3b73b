"""The search: starts, list schedules, and steps of critical paths moved from the best of them, within a budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from pipefit.synthesize.greedy import listed, nearby, policies
from pipefit.synthesize.order_problem import BACKWARD, INPUT, WEIGHT, Order, OrderProblem
from pipefit.synthesize.order_times import Times, timed

_KEPT = 6  # the best orders, of which the first few are searched around
_STARTS = 2
_LISTED = 0.02  # fraction of the candidates that are list schedules of policies near the best
_LISTING = 0.4  # maximum fraction of the seconds for these
EQUAL = 1e-9  # relative difference below which times are equal
_MEMORY = 30  # an order may be no worse than the one kept this many orders ago, or than the last one
_TRIES = 20  # attempts at a valid move
_REACH = 12  # maximum places that a step moves


@dataclass
class Walk:
    """A running search.

    Attributes:
        problem: the problem whose order is searched.
        bound: a lower bound over all orders; the search ends there.
        candidates: maximum number of orders to examine.
        seconds: the time limit, by the clock.
        best: the best orders, each with its makespan.
        looked_at: orders examined so far.
        is_cut_short: whether the clock has ended a part of it.
    """

    problem: OrderProblem
    bound: float
    candidates: int
    seconds: float
    best: list[tuple[float, Order]] = field(default_factory=list)
    looked_at: int = 0
    is_cut_short: bool = False

    def run(self, starts: Sequence[Order], random: Random) -> list[Order]:
        """The best orders, the fastest first."""
        began = time.monotonic()
        for start in starts:
            self._look(start)
        self._list_schedules(random, began + _LISTING * self.seconds)
        chosen = self.best[:_STARTS]
        for turn, (_, order) in enumerate(chosen):
            num_left = len(chosen) - turn
            share = (self.candidates - self.looked_at) // num_left
            later = (1 - _LISTING) * (num_left - 1) / len(chosen)
            deadline = began + self.seconds * (1 - later)
            for makespan, new in islice(improved(self.problem, order, random), share):
                self._note(makespan, new)
                if self._is_over(deadline):
                    break
        return [order for _, order in self.best]

    def _list_schedules(self, random: Random, deadline: float) -> None:
        known = []
        for policy in policies(self.problem):
            order = listed(self.problem, policy)
            known.append((self._look(order), policy))
            if self._is_over(deadline):
                return
        known = sorted(known, key=lambda item: item[0])[:_STARTS]
        for turn in range(int(self.candidates * _LISTED) - self.looked_at):
            place = turn % len(known)
            before, near = known[place]
            policy = nearby(near, self.problem, random)
            makespan = self._look(listed(self.problem, policy))
            if makespan <= before:
                known[place] = makespan, policy
            if self._is_over(deadline):
                return

    def _look(self, order: Order | None) -> float:
        times = order and timed(self.problem, order)
        if not order or not times:
            self.looked_at += 1
            return float("inf")
        self._note(times.makespan_s, order)
        return times.makespan_s

    def _note(self, makespan: float, order: Order) -> None:
        self.looked_at += 1
        if len(self.best) == _KEPT and makespan >= self.best[-1][0]:
            return
        new = (makespan, order)
        if new not in self.best:
            found = sorted([*self.best, new], key=lambda item: item[0])
            self.best = found[:_KEPT]

    def _is_over(self, deadline: float) -> bool:
        if self.looked_at >= self.candidates:
            return True
        if self.best and self.best[0][0] <= self.bound * (1 + EQUAL):
            return True
        late = time.monotonic() >= deadline
        self.is_cut_short |= late
        return late


# ---------------------------------------------------------------------------------------- moves along critical paths


def improved(problem: OrderProblem, order: Order, random: Random) -> Iterator[tuple[float, Order]]:
    """An endless sequence of orders around one, each with its makespan.

    A step of the critical path moves before, or past, a few others of its rank; sometimes all later ones of its kind
    move too, because the pattern of a pipeline repeats. The new order is kept if it is no worse than the one kept last,
    or than the one kept some time ago (late acceptance). Of two equal makespans, the order whose ranks finish earlier
    is better.

    Source: Burke, Bykov, The late acceptance hill-climbing heuristic (European Journal of Operational Research 258,
    2017); moves on critical paths: Nowicki, Smutnicki, A fast taboo search algorithm for the job shop problem
    (Management Science 42, 1996).
    """
    times = timed(problem, order)
    assert times is not None
    path = times.critical()
    worth = _worth(times)
    past = [worth] * _MEMORY
    turn = 0
    while True:
        for _ in range(_TRIES):
            rank, index = random.choice(path)
            moved = _moved(order[rank], index, random)
            if moved != order[rank] and problem.keeps(rank, moved):
                break
        else:
            yield times.makespan_s, order
            continue
        new = list(order)
        new[rank] = moved
        then = timed(problem, new)
        if then is not None and _worth(then) <= max(worth, past[turn % _MEMORY]):
            order = new
            times = then
            worth = _worth(then)
            path = then.critical()
        past[turn % _MEMORY] = worth
        turn += 1
        yield times.makespan_s, order


def _worth(times: Times) -> float:
    mean_s = sum(times.ends) / len(times.ends)
    return times.makespan_s + mean_s / 1000


def _moved(steps: list[int], index: int, random: Random) -> list[int]:
    """A rank's steps with one moved, or with a step before it moved past it; later steps of its kind may move along."""
    by = random.randint(1, _REACH)
    by *= random.choice((-1, 1))
    if random.random() < 0.5 and index:
        # A step that delays a critical one moves behind it.
        index = max(index - abs(by), 0)
        by = abs(by)
    places = [index]
    if random.random() < 0.2:
        later = range(index + 1, len(steps))
        likes = [place for place in later if steps[place] == steps[index]]
        count = random.randint(1, max(len(likes), 1))
        places += likes[:count]
    if by > 0:
        places.reverse()
    steps = list(steps)
    for place in places:
        step = steps.pop(place)
        # A place after the end is the end.
        steps.insert(max(place + by, 0), step)
    return steps


def with_whole_backwards(problem: OrderProblem, order: Order) -> Order:
    """Merges consecutive halves of a backward, where this delays nothing.

    A whole backward is one instruction, and keeps nothing between its halves.
    """
    count = problem.header.num_stages
    times = timed(problem, order)
    assert times is not None
    for rank in range(len(order)):
        index = 0
        while index + 1 < len(order[rank]):
            steps = order[rank]
            kind, stage = divmod(steps[index], count)
            if kind == INPUT and steps[index + 1] == WEIGHT * count + stage:
                merged = list(steps)
                merged[index : index + 2] = [BACKWARD * count + stage]
                new = list(order)
                new[rank] = merged
                after = timed(problem, new)
                if after is not None and after.makespan_s <= times.makespan_s:
                    order = new
            index += 1
    return order
