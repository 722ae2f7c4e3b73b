"""A lower bound on the makespan of every order."""

from __future__ import annotations

import heapq
from dataclasses import replace

from pipefit.synthesize.order_problem import BACKWARD, FORWARD, INPUT, WEIGHT, OrderProblem


def bound_s(problem: OrderProblem) -> float:
    """A time that no order of the steps can beat.

    First, for every step, what must come before and after it: along its micro-batch; the same step of the micro-batches
    before and after (they are alike, so they may be taken to go in order); and, where memory is limited, the end of the
    micro-batch whose place a forward takes. With these heads and tails each rank in isolation is one machine whose best
    order with interruptions is known: of what is there, always that with the longest tail. The worst rank counts.

    Source: Carlier, The one-machine sequencing problem (European Journal of Operational Research 11, 1982), for heads,
    tails and the bound with interruptions.
    """
    # A backward that stays whole may take less than its two halves.
    count = problem.header.num_stages
    inputs, weights, wholes = (problem.seconds[kind * count :][:count] for kind in (INPUT, WEIGHT, BACKWARD))
    rests = (min(w, b - i) for i, w, b in zip(inputs, weights, wholes, strict=True))
    problem = replace(problem, seconds=(*problem.seconds[: 2 * count], *rests, *wholes))
    chain = _chain(problem)
    heads, tails = _heads(problem, chain), _tails(problem, chain)
    bounds = []
    for stages in problem.stages:
        jobs = [
            (heads[step][mb], problem.seconds[step], tails[step][mb])
            for step in chain
            if step % count in stages
            for mb in range(problem.num_microbatches)
        ]
        bounds.append(_one_machine(jobs))
    return max(bounds)


def _chain(problem: OrderProblem) -> list[int]:
    """The steps of a micro-batch, in an order that its dependencies allow."""
    count = problem.header.num_stages
    backward = INPUT if problem.split else BACKWARD
    forwards = [FORWARD * count + stage for stage in range(count)]
    backwards = [backward * count + stage for stage in reversed(range(count))]
    return [*forwards, *backwards, *([WEIGHT * count + stage for stage in range(count)] if problem.split else [])]


def _before(problem: OrderProblem, step: int) -> list[tuple[int, float]]:
    """The step before a step within its micro-batch, and how long its result travels."""
    count = problem.header.num_stages
    kind, stage = divmod(step, count)
    if kind == WEIGHT:
        return [(INPUT * count + stage, 0)]
    source, lag = problem.feeds[step]
    if source < 0:
        return []
    backward = (INPUT if problem.split else BACKWARD) * count
    return [(source if source < count else backward + source - count, lag)]


def _window(problem: OrderProblem, stage: int) -> int:
    """Micro-batches of a stage that its rank has room for."""
    held = problem.takes[stage]
    room = problem.room[problem.home[stage]]
    return int(min(room / held, problem.num_microbatches)) if held else problem.num_microbatches


def _heads(problem: OrderProblem, chain: list[int]) -> dict[int, list[float]]:
    """For every step, by micro-batch, when it can start at the earliest."""
    count, seconds = problem.header.num_stages, problem.seconds
    last = (WEIGHT if problem.split else BACKWARD) * count
    heads: dict[int, list[float]] = {step: [] for step in chain}
    windows = [_window(problem, stage) for stage in range(count)]
    before = {step: _before(problem, step) for step in chain}
    for mb in range(problem.num_microbatches):
        for step in chain:
            times = [heads[other][mb] + seconds[other] + lag for other, lag in before[step]]
            if mb:
                times.append(heads[step][mb - 1] + seconds[step])
            if step < count and mb >= windows[step] > 0:
                times.append(heads[last + step][mb - windows[step]] + seconds[last + step])
            heads[step].append(max(times, default=0))
    return heads


def _tails(problem: OrderProblem, chain: list[int]) -> dict[int, list[float]]:
    """For every step, by micro-batch, what must follow its end at least."""
    count, seconds, total = problem.header.num_stages, problem.seconds, problem.num_microbatches
    last = (WEIGHT if problem.split else BACKWARD) * count
    tails: dict[int, list[float]] = {step: [0.0] * total for step in chain}
    windows = [_window(problem, stage) for stage in range(count)]
    after: dict[int, list[tuple[int, float]]] = {step: [] for step in chain}
    for step in chain:
        for other, lag in _before(problem, step):
            after[other].append((step, lag))
    for mb in reversed(range(total)):
        for step in reversed(chain):
            times = [lag + seconds[other] + tails[other][mb] for other, lag in after[step]]
            times.append(problem.closing_s[problem.home[step % count]])
            if mb + 1 < total:
                times.append(seconds[step] + tails[step][mb + 1])
            forward = step - last
            if forward >= 0 and 0 < windows[forward] < total - mb:
                times.append(seconds[forward] + tails[forward][mb + windows[forward]])
            tails[step][mb] = max(times)
    return tails


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
