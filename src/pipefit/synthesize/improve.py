"""Local search: steps of a critical path move along their rank's list."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pipefit.synthesize.order_problem import BACKWARD, INPUT, WEIGHT, Order, OrderProblem
from pipefit.synthesize.order_times import Times, timed

_MEMORY = 30  # orders ago: what a new one must not be worse than, unless it is no worse than the last
_TRIES = 20  # moves until one makes sense
_REACH = 12  # places that a step moves at most


def improved(problem: OrderProblem, order: Order, random: Random) -> Iterator[tuple[float, Order]]:
    """Orders around one, each with its makespan; it never ends.

    A step of the critical path moves to before, or past, a few others of its rank; sometimes all later ones of its kind
    too, as the rhythm of a pipeline repeats. What results is kept if it is no worse than what was kept last, or than
    what was kept some time ago (late acceptance), where of two makespans that are equal the one whose ranks are done
    earlier is better.

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
        new = [*order[:rank], moved, *order[rank + 1 :]]
        then = timed(problem, new)
        if then is not None and (_worth(then) <= worth or _worth(then) <= past[turn % _MEMORY]):
            order, times, worth, path = new, then, _worth(then), then.critical()
        past[turn % _MEMORY] = worth
        turn += 1
        yield times.makespan_s, order


def _worth(times: Times) -> float:
    return times.makespan_s + sum(times.ends) / len(times.ends) / 1000


def _moved(steps: list[int], index: int, random: Random) -> list[int]:
    """A rank's steps with one moved, or with a step before it moved past it; later steps of its kind may move along."""
    by = random.randint(1, _REACH) * random.choice((-1, 1))
    if random.random() < 0.5 and index:
        # A step that delays a critical one goes behind it.
        index = max(index - abs(by), 0)
        by = abs(by)
    places = [index]
    if random.random() < 0.2:
        likes = [place for place in range(index + 1, len(steps)) if steps[place] == steps[index]]
        places += likes[: random.randint(1, max(len(likes), 1))]
    steps = list(steps)
    for place in places if by < 0 else reversed(places):
        step = steps.pop(place)
        steps.insert(min(max(place + by, 0), len(steps)), step)
    return steps


def with_whole_backwards(problem: OrderProblem, order: Order) -> Order:
    """The same order with halves that follow each other made whole, wherever that makes nothing later.

    A whole backward is one instruction, and keeps nothing between its halves.
    """
    count = problem.header.num_stages
    times = timed(problem, order)
    assert times is not None
    for rank in range(len(order)):
        index = 0
        while index + 1 < len(order[rank]):
            (kind, stage), following = divmod(order[rank][index], count), order[rank][index + 1]
            if kind == INPUT and following == WEIGHT * count + stage:
                steps = [*order[rank][:index], BACKWARD * count + stage, *order[rank][index + 2 :]]
                new = [*order[:rank], steps, *order[rank + 1 :]]
                after = timed(problem, new)
                if after is not None and after.makespan_s <= times.makespan_s:
                    order = new
            index += 1
    return order
