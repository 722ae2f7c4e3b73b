"""Times of the steps of an order by the simulator's law without rendezvous, thousands of orders per second."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from pipefit.synthesize.order_problem import WEIGHT, Order, OrderProblem

Place = tuple[int, int]
"""The place of a step: its rank, and its index there."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of an order.

    Attributes:
        makespan_s: seconds from the first start to the last end.
        starts: the start of each step of each rank.
        fed_by: the step (rank, index) whose message each step waited for; None: only for its rank.
        ends: the end of each rank's last step.
    """

    makespan_s: float
    starts: list[list[float]]
    fed_by: list[list[Place | None]]
    ends: list[float]

    def critical(self) -> list[Place]:
        """Steps (rank, index) that follow each other without a gap, up to the end of all; the last one first."""
        rank = self.ends.index(max(self.ends))
        index = len(self.starts[rank]) - 1
        path = []
        while index >= 0:
            path.append((rank, index))
            feeder = self.fed_by[rank][index]
            if feeder:
                rank, index = feeder
            else:
                index -= 1
        return path


def timed(problem: OrderProblem, order: Order) -> Times | None:
    """The times of an order; None: its ranks wait for each other for ever."""
    seconds = problem.seconds
    feeds = problem.feeds
    count = problem.header.num_stages
    # Steps that feed others: forwards by stage, then backwards by stage; ends and places by micro-batch.
    ends: list[list[float]] = [[] for _ in range(2 * count)]
    places: list[list[Place]] = [[] for _ in range(2 * count)]
    waiting = [-1] * (2 * count)
    starts: list[list[float]] = [[] for _ in order]
    fed_by: list[list[Place | None]] = [[] for _ in order]
    clock = [0.0] * len(order)
    ready = list(range(len(order)))
    while ready:
        rank = ready.pop()
        steps = order[rank]
        begun = starts[rank]
        fed = fed_by[rank]
        now = clock[rank]
        for step in steps[len(begun) :]:
            source, lag = feeds[step]
            feeder = None
            target = step
            if target >= 2 * count:
                target -= 2 * count
            if source >= 0:
                turn = len(ends[target])
                if turn >= len(ends[source]):
                    waiting[source] = rank
                    break
                arrival = ends[source][turn] + lag
                if arrival > now:
                    now = arrival
                    feeder = places[source][turn]
            fed.append(feeder)
            begun.append(now)
            now += seconds[step]
            if step // count != WEIGHT:
                ends[target].append(now)
                places[target].append((rank, len(begun) - 1))
                if waiting[target] >= 0:
                    ready.append(waiting[target])
                    waiting[target] = -1
        clock[rank] = now
    if list(map(len, starts)) != list(map(len, order)):
        return None
    last = list(map(add, clock, problem.closing_s))
    return Times(max(last), starts, fed_by, last)
