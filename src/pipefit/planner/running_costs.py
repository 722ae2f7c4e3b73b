"""The speeds of ranks and the costs of layers, estimated from the times of stages while a run trains.

The seconds of a stage s on a rank r are a product:

    T(s, r) = slow(r) · Σ cost(l)      l in s

From one cut only the product is known: a stage takes long because its rank is slow, or because its layers cost more
than was assumed. But layers do not change, and ranks do not change because layers move: so a surprise between two moves
is one of the rank, and one that comes with a move is one of the layers that moved.

    spell        1           2   move   3           4
    cut          A           A          B           B
    slowness     of spell 1  ├── of both ──┤        of spell 4

A spell is a time without a surprise. The factors are those of least squares of the logarithms, over all spells that say
something about costs and the present one, by Gauss and Newton's method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Place = tuple[int, int]
"""A rank, and one of its stages."""

_ROUNDS = 8
_UNKNOWN = 10.0
"""Standard deviation of the logarithm of a slowness: nothing is known about it before."""
_LEAST_NOISE = 0.02
_SURPRISING = 3.0
"""Multiple of the noise beyond which a time is no chance."""
_MOST_COUNTED = 4
"""Windows of a spell by which its noise becomes smaller."""
_CLOSE = 1e-6


class Factors(NamedTuple):
    """An estimate.

    Attributes:
        costs: seconds of each layer per micro-batch, on a rank whose slowness is 1.
        slowness: of each rank: the factor of the seconds of its layers.
    """

    costs: tuple[float, ...]
    slowness: tuple[float, ...]


@dataclass
class _Spell:
    """A time in which no rank and no cut has changed.

    Attributes:
        stages: layers of each stage.
        group: the number of the slowness of its ranks; those before and after a move are the same.
        means: of the logarithms of the times.
        count: of the windows in them.
        noise: of a window.
    """

    stages: Sequence[tuple[int, ...]]
    group: int
    means: dict[Place, float]
    noise: float
    count: int = 1


class RunningCosts:
    """The estimate, which each window of a run improves.

    Args:
        costs: of each layer, as assumed; more than 0, in any unit.
        num_ranks: of the run.
        spread: relative error of the assumed costs, as a standard deviation.
    """

    def __init__(self, costs: Sequence[float], num_ranks: int, spread: float) -> None:
        self._assumed = np.log(costs)
        self._num_ranks = num_ranks
        self._spread = spread
        self._spells: list[_Spell] = []

    def observe(
        self, times: Mapping[Place, float], stages: Sequence[tuple[int, ...]], noise: float, has_moved: bool
    ) -> Factors:
        """Takes the times of a window; returns the estimate.

        Args:
            times: seconds per micro-batch of each stage on each of its ranks.
            stages: layers of each stage.
            noise: relative error of the times, as a standard deviation.
            has_moved: whether layers have moved since the window before.
        """
        noise = max(noise, _LEAST_NOISE)
        logs = {place: math.log(seconds) for place, seconds in times.items()}
        spells = self._spells
        if not spells:
            spells.append(_Spell(stages, 0, logs, noise))
        elif has_moved:
            spells.append(_Spell(stages, spells[-1].group, logs, noise))
        elif _is_surprise(spells[-1], logs, noise):
            last = spells[-1]
            if [spell.group for spell in spells].count(last.group) == 1:
                spells.pop()  # it has been compared with no other cut, so it says nothing about costs
            spells.append(_Spell(stages, last.group + 1, logs, noise))
        else:
            _average(spells[-1], logs)
        return self._solved()

    def _solved(self) -> Factors:
        """The factors of least squares; see the module."""
        count = len(self._assumed)
        groups = sorted({spell.group for spell in self._spells})
        starts = {group: count + index * self._num_ranks for index, group in enumerate(groups)}
        unknowns = count + len(groups) * self._num_ranks
        spreads = np.full(unknowns, _UNKNOWN)
        spreads[:count] = self._spread
        # All ranks are as slow as the first measurement says, before it is known which is slower.
        first = self._spells[0]
        place, mean = next(iter(first.means.items()))
        layers = list(first.stages[place[1]])
        before = np.full(unknowns, mean - float(np.log(np.exp(self._assumed[layers]).sum())))
        before[:count] = self._assumed
        found = before.copy()
        for _ in range(_ROUNDS):
            normal = np.diag(spreads**-2)
            right = (before - found) / spreads**2
            for spell in self._spells:
                slopes, errors = _compared(spell, found, starts[spell.group])
                normal += slopes.T @ slopes
                right += slopes.T @ errors
            change = np.linalg.solve(normal, right)
            found = found + change
            if np.abs(change).max() < _CLOSE:
                break
        now = starts[self._spells[-1].group]
        costs = np.exp(found[:count]).tolist()
        slowness = np.exp(found[now : now + self._num_ranks]).tolist()
        return Factors(tuple(costs), tuple(slowness))


def _compared(spell: _Spell, found: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The slopes of a spell's logarithms, and by how much they are too small, both over their noise."""
    weight = math.sqrt(min(spell.count, _MOST_COUNTED)) / spell.noise
    slopes = np.zeros((len(spell.means), len(found)))
    errors = np.zeros(len(spell.means))
    for row, ((rank, stage), mean) in enumerate(sorted(spell.means.items())):
        layers = list(spell.stages[stage])
        costs = np.exp(found[layers])
        slopes[row, layers] = weight * costs / costs.sum()
        slopes[row, start + rank] = weight
        errors[row] = weight * (mean - math.log(costs.sum()) - found[start + rank])
    return slopes, errors


def _is_surprise(spell: _Spell, logs: Mapping[Place, float], noise: float) -> bool:
    apart = [abs(logs[place] - mean) for place, mean in spell.means.items()]
    return max(apart) > _SURPRISING * max(noise, spell.noise)


def _average(spell: _Spell, logs: Mapping[Place, float]) -> None:
    """Adds a window to the means."""
    spell.count += 1
    for place, value in logs.items():
        spell.means[place] += (value - spell.means[place]) / spell.count
