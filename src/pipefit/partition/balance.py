"""Partitions of consecutive layers into a given number of stages: GPipe's, the least maximum, equal counts.

The layers are taken in the order of the profile. All are exact, and equally good partitions are ordered by their cut
positions: the earliest first. `divide` also serves the planner, where stages differ in speed, links and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import PlanError
from pipefit.spec import Partition, Profile

Array = NDArray[np.float64]

# Costs and times closer than this, relatively, are a tie: sums in another order differ by as much.
TIE = 1e-12


def uniform(profile: Profile, num_stages: int) -> Partition:
    """Equal numbers of layers; the first stages have one more where they do not divide evenly.

    Raises:
        PlanError: fewer layers than stages.
    """
    _check(profile, num_stages)
    return Partition.even(len(profile), num_stages)


def gpipe(profile: Profile, num_stages: int, speeds: Sequence[float] = ()) -> Partition:
    """Least variance of the stages' seconds (Huang et al., GPipe, NeurIPS 2019, section 2.2).

    The mean is fixed by the total, so this minimises Σ (cost − total/num_stages)², by dynamic programming over (stages,
    layers): O(num_stages · layers²). On devices of different speeds it is Σ (cost/speed − total/Σ speeds)². The cost of
    a layer is its forward and backward time, the loss with the last layer. (GPipe estimates floating-point operations.)

    Args:
        profile: the layers.
        num_stages: number of stages.
        speeds: the speed of each stage's device, by which its cost is divided, when they differ.

    Raises:
        PlanError: fewer layers than stages, or another number of speeds than stages.
    """
    _check(profile, num_stages)
    cost = spans(layer_times(profile))
    speeds = speeds or (1.0,) * num_stages
    if len(speeds) != num_stages or not min(speeds) > 0:
        raise PlanError(f"speeds: expected {num_stages} above 0, one for each stage, got {list(speeds)}")
    total = cost[0, -1]
    mean = total / sum(speeds)
    away = {}
    for speed in speeds:
        away[speed] = allowed((cost / speed - mean) ** 2)
    scale = (total / min(speeds)) ** 2
    return Partition.from_counts(_least_sum([away[speed] for speed in speeds], scale))


def minmax(
    profile: Profile,
    num_stages: int,
    costs: Sequence[float] | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> Partition:
    """Minimises the cost of the slowest stage; among equal ones, the sum of squares of stage costs.

    Args:
        profile: the layers.
        num_stages: number of stages.
        costs: the costs of each layer; None: its forward and backward time in seconds, the loss with the last layer.
        bandwidth_bytes_per_s: of the link between stages; the cost of a stage then includes receiving activations and
            sending gradients across the cut in front of it, and the reverse behind it, without overlap. None: nothing.
        latency_s: the latency of each message.

    Raises:
        PlanError: fewer layers than stages, another number of costs than layers, or no bandwidth.
    """
    _check(profile, num_stages)
    if costs is None:
        costs = layer_times(profile)
    if len(costs) != len(profile):
        raise PlanError(f"costs: expected one for each of the {len(profile)} layers, got {len(costs)}")
    cost = spans(costs)
    if bandwidth_bytes_per_s is not None:
        if not bandwidth_bytes_per_s > 0:
            raise PlanError(f"bandwidth_bytes_per_s: expected more than 0, got {bandwidth_bytes_per_s}")
        cost = cost + message_spans(profile.cut_bytes, bandwidth_bytes_per_s, latency_s)
    counts = divide([cost] * num_stages)
    assert counts is not None
    return Partition.from_counts(counts)


def _check(profile: Profile, num_stages: int) -> None:
    if num_stages < 1:
        raise PlanError(f"num_stages: expected at least 1, got {num_stages}")
    if num_stages > len(profile):
        raise PlanError(
            f"{num_stages} stages need at least {num_stages} layers, and {profile.model} has {len(profile)}; "
            "use fewer stages or profile smaller layers"
        )


# --------------------------------------------------------------------------------------- arrays [a, b]: layers a…b−1


def layer_times(profile: Profile) -> list[float]:
    """Seconds of each layer, the loss with the last."""
    times = [layer.total_s for layer in profile.layers]
    times[-1] += profile.loss_s
    return times


def spans(figures: Sequence[float]) -> Array:
    """Array [a, b]: the sum over the items a…b−1; 0 where there are none."""
    sums = np.cumsum(np.asarray(figures, dtype=np.float64))
    total = np.concatenate(([0.0], sums))
    difference = total[None, :] - total[:, None]
    return np.asarray(np.maximum(difference, 0.0))


def message_spans(cut_bytes: Sequence[float], bandwidth_bytes_per_s: float, latency_s: float) -> Array:
    """Array [a, b]: seconds of a stage's messages, in and out, both ways, if none overlapped with its work."""
    inner = [2 * (size / bandwidth_bytes_per_s + latency_s) for size in cut_bytes]
    links = np.array([0.0, *inner, 0.0])
    return np.asarray(links[:, None] + links[None, :])


def divide(costs: Sequence[Array]) -> list[int] | None:
    """Layer counts of the stages; None when no division is allowed.

    Least maximum; among those least sum of squares; among those the earliest cuts.

    Args:
        costs: of each stage k an array [a, b], its cost if it holds the layers a…b−1; infinite: not allowed. One array
            object may serve many stages.
    """
    ready = {id(cost): allowed(cost) for cost in costs}
    worst = least_maximum(ready[id(cost)] for cost in costs)
    if not np.isfinite(worst):
        return None
    limit = worst * (1 + TIE)
    squares = {}
    for key, cost in ready.items():
        squares[key] = np.where(cost <= limit, cost**2, np.inf)
    return _least_sum([squares[id(cost)] for cost in costs], worst**2)


def least_maximum(costs: Iterable[Array]) -> float:
    """The cost of the dearest stage of the best division, from the arrays of `divide`; infinite for no layers."""
    return float(_least(list(costs), np.maximum)[0][0])


def allowed(cost: Array) -> Array:
    """The costs, infinite where a is not before b."""
    return np.where(_before(len(cost)), cost, np.inf)


@lru_cache(maxsize=8)
def _before(count: int) -> NDArray[np.bool_]:
    return np.triu(np.ones((count, count), dtype=bool), 1)


def _least_sum(costs: list[Array], scale: float) -> list[int]:
    """Layer counts of the first division whose sum is least (to a tiny fraction of `scale`)."""
    best = _least(costs, np.add)
    counts = []
    start = 0
    for stage, cost in enumerate(costs):
        reached = cost[start] + best[stage + 1]
        least = best[stage][start] + TIE * scale
        end = int((reached <= least).argmax())
        counts.append(end - start)
        start = end
    return counts


def _least(costs: list[Array], join: np.ufunc) -> list[Array]:
    """best[k][a]: the least joined cost of the layers from a on in the stages from k on."""
    nothing = np.full(len(costs[0]), np.inf)
    nothing[-1] = 0.0
    best = [nothing]
    for cost in reversed(costs):
        joined = join(cost, best[-1][None, :])
        best.append(joined.min(axis=1))
    return best[::-1]
