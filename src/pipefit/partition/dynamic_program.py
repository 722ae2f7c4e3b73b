"""The dynamic program of PipeDream's partitioner.

With S(t→u, r) the cost of a stage from state t to state u on r components (`stage_costs.py`), and V(t→j, n) the best
time of the layers from t to j on n components,

    V(t→j, n) = min over u, r of max{ S(t→u, r), V(u→j, n − r) },     V(t→j, n) = S(t→j, n) where it is not split,

which is A^k of the paper read from the other end. Stages are split off at the front, so the number of components from
a stage to the end, which determines its mini-batches in flight, is known when its memory is checked. Levels below the
outermost need V for every pair (t, j); the outermost, and the reconstruction, for one. A second run with + in place of
max, over the stages that are fast enough, counts stages. It finds the fewest, and then the lexicographically first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pipefit.partition.balance import TIE, Array
from pipefit.partition.stage_costs import CutProblem


@dataclass(frozen=True)
class Run:
    """One stage of one level: the layers from state `start` to state `end` on `replicas` components.

    `beyond` is the number of devices behind it for each of its copies (see `CutProblem.context`).
    """

    start: int
    end: int
    replicas: int
    beyond: int


@dataclass(frozen=True)
class _Choice:
    """Stages of `replicas` components with low…high components from them to the end, all in one context."""

    replicas: int
    low: int
    high: int
    child: int


def _choices(problem: CutProblem, level: int, beyond: int) -> list[_Choice]:
    width = problem.levels[level - 1][0]
    result = []
    for replicas in problem.replica_counts(width):
        contexts = {}
        for components in range(replicas, width + 1):
            contexts[components] = problem.context(level, beyond, components, replicas)
        for child, group in groupby(contexts, contexts.__getitem__):
            left = list(group)
            result.append(_Choice(replicas, left[0], left[-1], child))
    return result


def base_s(problem: CutProblem, level: int, beyond: int) -> Array:
    """Array [a, b]: seconds per mini-batch of the layers from state a to b on one component of a level."""
    if level == 0:
        return problem.device_s(beyond, slice(None), slice(None))
    key = (level, beyond)
    if key not in problem.bases:
        problem.bases[key] = all_pairs(problem, level, beyond)
    return problem.bases[key]


# ---------------------------------------------------------------------------------------------- every pair of states


def all_pairs(problem: CutProblem, level: int, beyond: int) -> Array:
    """V(t→j) on one component of the level above, for every pair of states: N³/6 steps for each two replica counts."""
    width = problem.levels[level - 1][0]
    # Without a memory limit the count of components left does not matter to a stage, so "at most n" can be kept.
    at_most = not problem.rule.released and not problem.memory.is_limited
    rest: dict[int, Array] = {}

    def look(result: Array, left: int, first: bool) -> None:
        """Splits the remaining components between a stage in front and the rest."""
        for replicas in problem.replica_counts(left):
            child = problem.context(level, beyond, left, replicas)
            base = base_s(problem, level - 1, child)
            if replicas == left or (first and at_most):
                whole = problem.stage_s(level, base, replicas, slice(None), slice(None), first, last=True)
                np.minimum(result, whole, out=result)
            if replicas < left:
                front = problem.stage_s(level, base, replicas, slice(None), slice(None), first, last=False)
                _join(result, front, rest[left - replicas])

    for left in range(1, width):
        if at_most and left > 1:
            rest[left] = rest[left - 1].copy()
        else:
            rest[left] = np.full_like(problem.compute_s, np.inf)
        look(rest[left], left, first=False)
    result = np.full_like(problem.compute_s, np.inf)
    totals: Iterable[int] = problem.totals(level)
    if at_most:
        totals = (width,)
    for total in totals:
        look(result, total, first=True)
    return result


def _join(best: Array, left: Array, right: Array) -> None:
    """best[t, j] = min(best[t, j], min over u of max(left[t, u], right[u, j])) for t < u < j, in place.

    Where memory is limited, many stages are infinite; each u has a window of rows and one of columns that are not.
    """
    tops, bottoms = _ends(np.isfinite(left).T)
    starts, stops = _ends(np.isfinite(right))
    for u in range(1, len(best) - 1):
        if bottoms[u] and stops[u]:
            rows = slice(tops[u], bottoms[u])
            columns = slice(starts[u], stops[u])
            target = best[rows, columns]
            slower = np.maximum(left[rows, u, None], right[u, columns])
            np.minimum(target, slower, out=target)


# ------------------------------------------------------------------------------------------------- one pair of states


def best_time(problem: CutProblem, level: int, beyond: int, start: int, end: int) -> float:
    """V(start→end) on one component of the level above; infinite when nothing fits."""
    bound = float("inf")
    states = _states_on_the_way(problem, start, end)
    if len(states) > 200:
        # A solution over every eighth boundary is an upper bound: slower stages need not be considered.
        few = _table(problem, level, beyond, [*states[:-1:8], end])
        bound = _fastest(problem, level, few)
    table = _table(problem, level, beyond, states, bound)
    return _fastest(problem, level, table)


def runs(problem: CutProblem, level: int, beyond: int, start: int, end: int, time_s: float) -> list[Run]:
    """The stages of one level that reach `time_s`: the fewest, then the first by (end, replicas), stage after stage."""
    states = _states_on_the_way(problem, start, end)
    limit = time_s * (1 + TIE)
    counts = _table(problem, level, beyond, states, limit, count=True)
    totals = problem.totals(level)
    fewest = min(counts[0, n] for n in totals)
    left = {n for n in totals if counts[0, n] == fewest}
    found = []
    position = 0
    remaining = int(fewest)
    choices = _choices(problem, level, beyond)
    while remaining:
        options: dict[tuple[int, int], dict[int, int]] = {}
        costs = _rows(problem, level, choices, states, position, first=position == 0)
        for choice, middle, last in zip(choices, *costs, strict=True):
            for n in left:
                if not choice.low <= n <= choice.high:
                    continue
                after = n - choice.replicas
                if remaining > 1:
                    has_rest = counts[position + 1 : -1, after] == remaining - 1
                    good = (middle <= limit) & has_rest
                    if not good.any():
                        continue
                    stop = position + 1 + int(good.argmax())
                elif after == 0 and last <= limit:
                    stop = len(states) - 1
                else:
                    continue
                options.setdefault((stop, choice.replicas), {})[n] = choice.child
        stop, replicas = min(options)
        # Runs with other numbers of remaining components may be equally good; they differ only in unused components.
        children = options[stop, replicas]
        n = min(children)
        run = Run(states[position], states[stop], replicas, children[n])
        found.append(run)
        left = {n - replicas}
        position = stop
        remaining -= 1
    assert np.isfinite(fewest)
    return found


def _states_on_the_way(problem: CutProblem, start: int, end: int) -> list[int]:
    inside = problem.states.inside
    between = inside[start] & inside[:, end]
    return [start, *np.flatnonzero(between).tolist(), end]


def _fastest(problem: CutProblem, level: int, table: Array) -> float:
    times = [float(table[0, n]) for n in problem.totals(level)]
    return min(times)


def _rows(
    problem: CutProblem, level: int, choices: list[_Choice], states: list[int], position: int, first: bool
) -> tuple[Array, Array]:
    """Cost of the stages from a position on: (choice, end) for ends before the last, and (choice,) for the last."""
    row = states[position]
    columns = np.array(states[position + 1 :])
    replicas = np.array([[choice.replicas] for choice in choices], dtype=np.float64)
    children = dict.fromkeys(choice.child for choice in choices)
    bases = {child: number for number, child in enumerate(children)}
    if level == 1:
        beyond = np.array([[child] for child in children])
        base = problem.device_s(beyond, row, columns)
    else:
        each = []
        for child in children:
            each.append(base_s(problem, level - 1, child)[row, columns])
        base = np.stack(each)
    base = base[[bases[choice.child] for choice in choices]]
    middle = problem.stage_s(level, base[..., :-1], replicas, row, columns[:-1], first, last=False)
    last = problem.stage_s(level, base[..., -1:], replicas, row, columns[-1:], first, last=True)
    return middle, last[:, 0]


def _table(
    problem: CutProblem,
    level: int,
    beyond: int,
    states: list[int],
    limit: float = float("inf"),
    count: bool = False,
) -> Array:
    """V(t→end, n) for every position t and exactly n components (array [t, n]); with `count`, numbers of stages.

    Stages slower than `limit` are left out.
    """
    width = problem.levels[level - 1][0]
    choices = _choices(problem, level, beyond)
    join: np.ufunc = np.maximum
    if count:
        join = np.add
    table = np.full((len(states), width + 1), np.inf)
    for position in range(len(states) - 2, -1, -1):
        middle, last = _rows(problem, level, choices, states, position, first=position == 0)
        good = np.asarray(middle <= limit, dtype=np.bool_)
        is_good = last <= limit
        # From the first to the last end that is fast enough; a slower one between them stays out as infinite.
        low, high = _ends(good)
        if count:
            middle = np.ones_like(middle)
            last = np.ones_like(last)
        middle = np.where(good, middle, np.inf)
        rest = table[position + 1 : -1]
        target = table[position]
        for index, choice in enumerate(choices):
            replicas = choice.replicas
            if choice.low == replicas and is_good[index]:
                target[replicas] = min(target[replicas], last[index])
            if high[index]:
                piece = slice(low[index], high[index])
                behind = rest[piece, choice.low - replicas : choice.high - replicas + 1]
                found = join(middle[index, piece, None], behind).min(axis=0)
                reached = target[choice.low : choice.high + 1]
                np.minimum(reached, found, out=reached)
    return table


def _ends(good: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """The index of each row's first true entry, and the index behind its last; 0 and 0 where there is none."""
    rows, columns = good.shape
    if columns == 0:
        return [0] * rows, [0] * rows
    first = good.argmax(axis=1)
    behind = columns - good[:, ::-1].argmax(axis=1)
    behind[~good.any(axis=1)] = 0
    return first.tolist(), behind.tolist()
