"""The search: starts, list schedules, and moves from the best of them, within a budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from pipefit.synthesize.greedy import Policy, listed, nearby, policies
from pipefit.synthesize.improve import improved
from pipefit.synthesize.order_problem import Order, OrderProblem
from pipefit.synthesize.order_times import timed

_KEPT = 6  # the best orders, of which the first few are searched around
_STARTS = 2
_LISTED = 0.02  # of the candidates: list schedules of policies near the best
_LISTING = 0.4  # of the seconds, at most: the same
_EQUAL = 1e-9  # of a time: less is no difference


@dataclass
class Walk:
    """A search under way.

    Attributes:
        problem: of the order.
        bound: a time that no order can beat: there the search ends.
        candidates: orders to look at.
        seconds: of the clock.
        best: the best orders, each with its makespan.
        looked_at: orders so far.
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
            share = (self.candidates - self.looked_at) // (len(chosen) - turn)
            deadline = began + self.seconds * (1 - (1 - _LISTING) * (len(chosen) - turn - 1) / len(chosen))
            for makespan, new in islice(improved(self.problem, order, random), share):
                self._note(makespan, new)
                if self._is_over(deadline):
                    break
        return [order for _, order in self.best]

    def _list_schedules(self, random: Random, deadline: float) -> None:
        known: list[tuple[float, Policy]] = []
        for policy in policies(self.problem):
            known.append((self._look(listed(self.problem, policy)), policy))
            if self._is_over(deadline):
                return
        known = sorted(known, key=lambda item: item[0])[:_STARTS]
        for turn in range(int(self.candidates * _LISTED) - self.looked_at):
            place = turn % len(known)
            policy = nearby(known[place][1], self.problem, random)
            makespan = self._look(listed(self.problem, policy))
            if makespan <= known[place][0]:
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
        if all(makespan != other or order != known for other, known in self.best):
            self.best = sorted([*self.best, (makespan, order)], key=lambda item: item[0])[:_KEPT]

    def _is_over(self, deadline: float) -> bool:
        if (self.best and self.best[0][0] <= self.bound * (1 + _EQUAL)) or self.looked_at >= self.candidates:
            return True
        late = time.monotonic() >= deadline
        self.is_cut_short |= late
        return late
