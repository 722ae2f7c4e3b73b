"""The dynamic program of PipeDream's partitioner.

With S(t→u, r) the cost of a stage from state t to state u on r components (`problem.py`), and V(t→j, n) the best time
of the layers from t to j on n components,

    V(t→j, n) = min over u, r of max{ S(t→u, r), V(u→j, n − r) },     V(t→j, n) = S(t→j, n) where it is not split,

which is A^k of the paper read from the other end: stages are split off at the front, so the number of components from
a stage on, which decides what it keeps in flight, is known when its memory is checked. Levels below the outermost need V
for every pair (t, j); the outermost, and the way back, for one. Run again with + in place of max, over the stages
that are fast enough, the program counts stages, and so finds the fewest, and then the lexicographically first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from pipefit.partition.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Run", "all_pairs", "best_time", "runs"]

# Times closer than this, relatively, are a tie: sums in another order differ by as much.
_TIE = 1e-12


@dataclass(frozen=True)
class Run:
    """One stage of one level: the layers from state `start` to state `end` on `replicas` components.

    `beyond` is the number of devices behind it for each of its copies (see `Problem.context`).
    """

    start: int
    end: int
    replicas: int
    beyond: Fraction


@dataclass(frozen=True)
class _Choice:
    """Stages of `replicas` components when low…high components are left from them on, all in one context."""

    replicas: int
    low: int
    high: int
    child: Fraction


def _choices(problem: Problem, level: int, beyond: Fraction) -> list[_Choice]:
    width = problem.levels[level - 1][0]
    result = []
    for replicas in problem.replica_counts(width):
        counts = range(replicas, width + 1)
        for child, group in groupby(counts, lambda n: problem.context(level, beyond, n, replicas)):
            left = list(group)
            result.append(_Choice(replicas, left[0], left[-1], child))
    return result


def base_s(problem: Problem, level: int, beyond: Fraction) -> Array:
    """Array [a, b]: seconds per mini-batch of the layers from state a to b on one component of a level."""
    if level == 0:
        return problem.device_s(float(beyond), slice(None), slice(None))
    key = (level, beyond)
    if key not in problem.bases:
        problem.bases[key] = all_pairs(problem, level, beyond)
    return problem.bases[key]


# ---------------------------------------------------------------------------------------------- every pair of states


def all_pairs(problem: Problem, level: int, beyond: Fraction) -> Array:
    """V(t→j) on one component of the level above, for every pair of states: N³/6 steps for each two replica counts."""
    import numpy as np

    width = problem.levels[level - 1][0]
    everything = slice(None)

    def stage(replicas: int, left: int, first: bool, last: bool) -> Array:
        base = base_s(problem, level - 1, problem.context(level, beyond, left, replicas))
        return problem.stage_s(level, base, replicas, everything, everything, first, last)

    # Without a memory limit the count of components left does not matter to a stage, so "at most n" can be kept.
    at_most = not problem.rule.exact and not problem.memory.is_limited
    rest: dict[int, Array] = {}
    for left in range(1, width):
        found = np.full_like(problem.compute_s, np.inf)
        for replicas in problem.replica_counts(left):
            if replicas == left:
                np.minimum(found, stage(replicas, left, first=False, last=True), out=found)
            else:
                _join(found, stage(replicas, left, first=False, last=False), rest[left - replicas])
        rest[left] = np.minimum(found, rest[left - 1]) if at_most and left > 1 else found
    result = np.full_like(problem.compute_s, np.inf)
    for total in [width] if at_most else problem.totals(level):
        for replicas in problem.replica_counts(total):
            if replicas == total or at_most:
                np.minimum(result, stage(replicas, total, first=True, last=True), out=result)
            if replicas < total:
                _join(result, stage(replicas, total, first=True, last=False), rest[total - replicas])
    return result


def _join(best: Array, left: Array, right: Array) -> None:
    """best[t, j] = min(best[t, j], min over u of max(left[t, u], right[u, j])) for t < u < j, in place."""
    import numpy as np

    num_states = len(best)
    buffer = np.empty_like(best)
    # A row whose left part is no better than the worst entry of its result cannot improve it.
    helpful = left < np.where(np.triu(np.ones_like(best, dtype=bool), 2), best, 0.0).max(axis=1)[:, None]
    for middle in range(1, num_states - 1):
        rows = helpful[:middle, middle]
        start = int(rows.argmax())
        if not rows[start]:
            continue
        part = buffer[start:middle, middle + 1 :]
        np.maximum(left[start:middle, middle, None], right[middle, middle + 1 :], out=part)
        target = best[start:middle, middle + 1 :]
        np.minimum(target, part, out=target)


# ------------------------------------------------------------------------------------------------- one pair of states


def best_time(problem: Problem, level: int, beyond: Fraction, start: int, end: int) -> float:
    """V(start→end) on one component of the level above; infinite when nothing fits."""
    bound = float("inf")
    states = _states_on_the_way(problem, start, end)
    if len(states) > 200:
        # A solution over every eighth boundary is a solution: what is slower need not be looked at.
        bound = _fastest(problem, level, _table(problem, level, beyond, [*states[:-1:8], end]))
    return _fastest(problem, level, _table(problem, level, beyond, states, bound))


def runs(problem: Problem, level: int, beyond: Fraction, start: int, end: int, time_s: float) -> list[Run]:
    """The stages of one level that reach `time_s`: the fewest, then the first by (end, replicas), stage after stage."""
    import numpy as np

    states = _states_on_the_way(problem, start, end)
    limit = time_s * (1 + _TIE)
    counts = _table(problem, level, beyond, states, limit, count=True)
    totals = problem.totals(level)
    fewest = min(counts[0, n] for n in totals)
    left = {n for n in totals if counts[0, n] == fewest}
    found: list[Run] = []
    position, remaining = 0, int(fewest)
    choices = _choices(problem, level, beyond)
    while remaining:
        options: dict[tuple[int, int], dict[int, Fraction]] = {}
        costs = _rows(problem, level, choices, states, position, first=position == 0)
        for choice, middle, last in zip(choices, *costs, strict=True):
            for n in [n for n in left if choice.low <= n <= choice.high]:
                if remaining == 1:
                    ends = [len(states) - 1] if n == choice.replicas and last <= limit else []
                else:
                    good = (middle <= limit) & (counts[position + 1 : -1, n - choice.replicas] == remaining - 1)
                    ends = [position + 1 + int(good.argmax())] if good.any() else []
                for stop in ends:
                    options.setdefault((stop, choice.replicas), {})[n] = choice.child
        stop, replicas = min(options)
        # Runs of other counts of components left may be as good; they differ only in what they leave unused.
        n = min(options[stop, replicas])
        found.append(Run(states[position], states[stop], replicas, options[stop, replicas][n]))
        left = {n - replicas}
        position, remaining = stop, remaining - 1
    assert np.isfinite(fewest)
    return found


def _states_on_the_way(problem: Problem, start: int, end: int) -> list[int]:
    inside = problem.states.inside
    return [start, *(u for u in range(start + 1, end) if inside[start, u] and inside[u, end]), end]


def _fastest(problem: Problem, level: int, table: Array) -> float:
    return min(float(table[0, n]) for n in problem.totals(level))


def _rows(
    problem: Problem, level: int, choices: list[_Choice], states: list[int], position: int, first: bool
) -> tuple[Array, Array]:
    """Cost of the stages that start at a position: (choice, end) for ends before the last, and (choice,) for the last."""
    import numpy as np

    row, columns = states[position], np.array(states[position + 1 :])
    replicas = np.array([[choice.replicas] for choice in choices], dtype=np.float64)
    if level == 1:
        base = problem.device_s(np.array([[float(choice.child)] for choice in choices]), row, columns)
    else:
        tables = {choice.child: base_s(problem, level - 1, choice.child)[row, columns] for choice in choices}
        base = np.stack([tables[choice.child] for choice in choices])
    middle = problem.stage_s(level, base[..., :-1], replicas, row, columns[:-1], first, last=False)
    last = problem.stage_s(level, base[..., -1:], replicas, row, columns[-1:], first, last=True)
    return middle, last[:, 0]


def _table(
    problem: Problem,
    level: int,
    beyond: Fraction,
    states: list[int],
    limit: float = float("inf"),
    count: bool = False,
) -> Array:
    """V(t→end, n) for every position t and exactly n components (array [t, n]); with `count`, numbers of stages.

    Stages slower than `limit` are left out.
    """
    import numpy as np

    width = problem.levels[level - 1][0]
    choices = _choices(problem, level, beyond)
    join = np.add if count else np.maximum
    table = np.full((len(states), width + 1), np.inf)
    for position in range(len(states) - 2, -1, -1):
        middle, last = _rows(problem, level, choices, states, position, first=position == 0)
        for choice, before, alone in zip(choices, middle, last, strict=True):
            if alone <= limit and choice.low == choice.replicas:
                table[position, choice.replicas] = min(
                    table[position, choice.replicas], 1.0 if count else float(alone)
                )
            for piece in _pieces(before <= limit):
                cost = np.ones_like(before[piece]) if count else before[piece]
                rest = table[position + 1 : -1][piece, choice.low - choice.replicas : choice.high - choice.replicas + 1]
                target = table[position, choice.low : choice.high + 1]
                np.minimum(target, join(cost[:, None], rest).min(axis=0), out=target)
    return table


def _pieces(good: NDArray[np.bool_]) -> Iterator[slice]:
    """The stretches of an array that are true."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate(([False], good, [False])).astype(np.int8)))
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(low), int(high))
