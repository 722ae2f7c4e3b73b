"""A lower bound on the makespan of every order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipefit.synthesize.order_problem import BACKWARD, INPUT, WEIGHT, OrderProblem


def bound_s(problem: OrderProblem) -> float:
    """A lower bound of the makespan over all orders of the steps.

    First, for every step, the work that must come before and after it: along its micro-batch; the same step of earlier
    and later micro-batches (they are alike, so they may be assumed to be in order); and, where memory is limited, the
    end of the micro-batch whose place a forward takes. With these heads and tails each rank in isolation is one machine
    whose best order with interruptions is known: of the available steps, always that with the longest tail. The bound
    is that of the worst rank.

    Source: Carlier, The one-machine sequencing problem (European Journal of Operational Research 11, 1982), for heads,
    tails and the bound with interruptions.
    """
    count = problem.header.num_stages
    if problem.split:
        backward = INPUT
    else:
        backward = BACKWARD
    seconds = list(problem.seconds)
    # A backward that stays whole may take less than its two halves.
    for first, second, whole in zip(*(range(kind * count, (kind + 1) * count) for kind in _BACKWARDS), strict=True):
        seconds[second] = min(seconds[second], seconds[whole] - seconds[first])
    # The steps of a micro-batch, in an order that its dependencies allow.
    chain = [*range(count), *(backward * count + stage for stage in reversed(range(count)))]
    if problem.split:
        chain += [WEIGHT * count + stage for stage in range(count)]
    edges = [Edge(step, step, 0.0, 1) for step in chain]
    for step in chain:
        source, lag = problem.feeds[step]
        if source >= 0:
            edges.append(Edge(source if source < count else source + (backward - INPUT) * count, step, lag))
        elif step >= count:
            edges.append(Edge(INPUT * count + step % count, step))
    last = (WEIGHT if problem.split else BACKWARD) * count
    for stage, held in enumerate(problem.takes):
        # Micro-batches of a stage that fit on its rank.
        if held:
            window = min(problem.room[problem.home[stage]] / held, problem.num_microbatches)
        else:
            window = 0
        if window >= 1:
            edges.append(Edge(last + stage, stage, 0.0, int(window)))
    heads = _longest(chain, edges, seconds, [0.0] * len(seconds), problem.num_microbatches)
    # The same from the end: the work that must follow each step.
    back = [Edge(edge.target, edge.source, edge.lag, edge.shift) for edge in edges]
    closing = [problem.closing_s[problem.home[step % count]] for step in range(len(seconds))]
    tails = _longest(chain[::-1], back, seconds, closing, problem.num_microbatches)
    bounds = []
    for stages in problem.stages:
        jobs = [
            (head, seconds[step], tail)
            for step in chain
            if step % count in stages
            for head, tail in zip(heads[step], reversed(tails[step]), strict=True)
        ]
        bounds.append(_one_machine(jobs))
    return max(bounds)


_BACKWARDS = (INPUT, WEIGHT, BACKWARD)


class Edge(NamedTuple):
    """A step that waits for another, some micro-batches earlier, and for the transfer of its result."""

    source: int
    target: int
    lag: float = 0.0
    shift: int = 0


def _longest(
    chain: Sequence[int], edges: Iterable[Edge], seconds: Sequence[float], least: Sequence[float], count: int
) -> dict[int, list[float]]:
    """For every step of a chain, by micro-batch, the longest path to it along the edges."""
    into: dict[int, list[Edge]] = {step: [] for step in chain}
    for edge in edges:
        into[edge.target].append(edge)
    found: dict[int, list[float]] = {step: [] for step in chain}
    for mb in range(count):
        for step in chain:
            edges = [edge for edge in into[step] if mb >= edge.shift]
            ways = [found[edge.source][mb - edge.shift] + seconds[edge.source] + edge.lag for edge in edges]
            found[step].append(max([least[step], *ways]))
    return found


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """The least end of (head, seconds, tail) on one machine that may interrupt them: longest tail first."""
    jobs = sorted(jobs)
    ready: list[tuple[float, float]] = []
    now = end = 0.0
    index = 0
    while index < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            heapq.heappush(ready, (-jobs[index][2], jobs[index][1]))
            index += 1
        tail, left = heapq.heappop(ready)
        if index < len(jobs) and now + left > jobs[index][0]:
            heapq.heappush(ready, (tail, left - (jobs[index][0] - now)))
            now = jobs[index][0]
        else:
            now += left
            end = max(end, now - tail)
    return end
