"""A lower bound on the makespan of every order."""

from __future__ import annotations

import heapq
import math
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
    num_microbatches = problem.num_microbatches

    def steps(kind: int) -> range:
        return range(kind * count, (kind + 1) * count)

    inputs = steps(INPUT)
    weights = steps(WEIGHT)
    wholes = steps(BACKWARD)
    seconds = list(problem.seconds)
    # A backward that stays whole may take less than its two halves.
    for first, second, whole in zip(inputs, weights, wholes, strict=True):
        seconds[second] = min(seconds[second], seconds[whole] - seconds[first])
    # The steps of a micro-batch, in an order that its dependencies allow.
    if problem.split:
        chain = [*range(count), *reversed(inputs), *weights]
        shift = 0
        last = weights.start
    else:
        chain = [*range(count), *reversed(wholes)]
        shift = wholes.start - inputs.start
        last = wholes.start
    edges = [Edge(step, step, 0.0, 1) for step in chain]
    for step in chain:
        source, lag = problem.feeds[step]
        if source >= count:
            source += shift
        if source >= 0:
            edges.append(Edge(source, step, lag))
        elif step >= count:
            edges.append(Edge(inputs[step % count], step))
    for stage, held in enumerate(problem.takes):
        if not held:
            continue
        # Micro-batches of a stage that fit on its rank.
        room = problem.room[problem.home[stage]]
        window = min(room / held, num_microbatches)
        if window >= 1:
            edges.append(Edge(last + stage, stage, 0.0, int(window)))
    nothing = [0.0] * len(seconds)
    heads = _longest(chain, edges, seconds, nothing, num_microbatches)
    # The same from the end: the work that must follow each step.
    back = [Edge(edge.target, edge.source, edge.lag, edge.shift) for edge in edges]
    closing = [problem.closing_s[problem.home[step % count]] for step in range(len(seconds))]
    tails = _longest(chain[::-1], back, seconds, closing, num_microbatches)
    bounds = []
    for stages in problem.stages:
        jobs = []
        for step in chain:
            if step % count in stages:
                for head, tail in zip(heads[step], reversed(tails[step]), strict=True):
                    jobs.append((head, seconds[step], tail))
        bounds.append(_one_machine(jobs))
    return max(bounds)


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
            longest = least[step]
            for source, _, lag, shift in into[step]:
                if mb >= shift:
                    way = found[source][mb - shift] + seconds[source] + lag
                    longest = max(longest, way)
            found[step].append(longest)
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
            _, work, tail = jobs[index]
            heapq.heappush(ready, (-tail, work))
            index += 1
        before, left = heapq.heappop(ready)
        begins = math.inf
        if index < len(jobs):
            begins = jobs[index][0]
        if now + left > begins:
            heapq.heappush(ready, (before, left - (begins - now)))
            now = begins
        else:
            now += left
            end = max(end, now - before)
    return end
