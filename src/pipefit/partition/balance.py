"""Partitions of consecutive layers into a given number of stages: GPipe's, the least maximum, equal counts, by hand.

The layers are taken in the order of the profile. All are exact, and equally good partitions are ordered by their cut
positions: the earliest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import PlanError
from pipefit.spec import Partition, Profile

Array = NDArray[np.float64]

# Costs closer than this, relatively, are a tie: sums in another order differ by as much.
_TIE = 1e-12


def uniform(profile: Profile, num_stages: int) -> Partition:
    """Equal numbers of layers; the first stages have one more where they do not divide evenly.

    Raises:
        PlanError: fewer layers than stages.
    """
    _check(profile, num_stages)
    return Partition.even(len(profile), num_stages)


def by_hand(profile: Profile, counts: Sequence[int]) -> Partition:
    """The given number of layers per stage.

    Raises:
        PlanError: an empty stage, or counts that do not add up to the layers of the profile.
    """
    return Partition.from_counts(counts, len(profile))


def gpipe(profile: Profile, num_stages: int, costs: Sequence[float] | None = None) -> Partition:
    """Least variance of the stages' costs (Huang et al., GPipe, NeurIPS 2019, section 2.2).

    The mean is fixed by the total, so this minimises Σ (cost − total/num_stages)², by dynamic programming over (stages,
    layers): O(num_stages · layers²).

    Args:
        profile: the layers.
        num_stages: how many stages.
        costs: of each layer; None: its forward and backward time, the loss with the last layer. (GPipe estimates
            floating-point operations.)

    Raises:
        PlanError: fewer layers than stages, or another number of costs than layers.
    """
    _check(profile, num_stages)
    cost = spans(_costs(profile, costs))
    mean = cost[0, -1] / num_stages
    return _divide((cost - mean) ** 2, num_stages, np.add, cost[0, -1] ** 2)


def minmax(
    profile: Profile,
    num_stages: int,
    costs: Sequence[float] | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> Partition:
    """The slowest stage as fast as can be; between equally slow ones, the least sum of squares of stage costs.

    Args:
        profile: the layers.
        num_stages: how many stages.
        costs: of each layer; None: its forward and backward time in seconds, the loss with the last layer.
        bandwidth_bytes_per_s: of the link between stages; a stage then also pays for receiving activations and sending
            gradients across the cut in front of it, and the reverse behind it, without overlap. None: nothing.
        latency_s: of each of those messages.

    Raises:
        PlanError: fewer layers than stages, another number of costs than layers, or no bandwidth.
    """
    _check(profile, num_stages)
    cost = spans(_costs(profile, costs))
    if bandwidth_bytes_per_s is not None:
        if not bandwidth_bytes_per_s > 0:
            raise PlanError(f"bandwidth_bytes_per_s: expected more than 0, got {bandwidth_bytes_per_s}")
        links = [0.0, *(2 * (size / bandwidth_bytes_per_s + latency_s) for size in profile.cut_bytes), 0.0]
        cost = cost + np.array(links)[:, None] + np.array(links)[None, :]
    worst = _least(cost, num_stages, np.maximum)[num_stages][0]
    fast_enough = np.where(cost <= worst * (1 + _TIE), cost**2, np.inf)
    return _divide(fast_enough, num_stages, np.add, worst**2)


def _costs(profile: Profile, costs: Sequence[float] | None) -> Sequence[float]:
    if costs is None:
        times = [layer.total_s for layer in profile.layers]
        return [*times[:-1], times[-1] + profile.loss_s]
    if len(costs) != len(profile):
        raise PlanError(f"costs: expected one for each of the {len(profile)} layers, got {len(costs)}")
    return costs


def _check(profile: Profile, num_stages: int) -> None:
    if num_stages < 1:
        raise PlanError(f"num_stages: expected at least 1, got {num_stages}")
    if num_stages > len(profile):
        raise PlanError(
            f"{num_stages} stages need at least {num_stages} layers, and {profile.model} has {len(profile)}; "
            "take fewer stages or profile smaller layers"
        )


def spans(costs: Sequence[float]) -> Array:
    """Array [a, b]: the cost of layers a…b−1; infinite where a is not before b."""
    total = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=np.float64))))
    cost = total[None, :] - total[:, None]
    return np.where(np.triu(np.ones_like(cost, dtype=bool), 1), np.maximum(cost, 0.0), np.inf)


def _least(cost: Array, num_stages: int, join: np.ufunc) -> list[Array]:
    """best[k][a]: the least joined cost of the layers from a on in k stages."""
    best = [np.append(np.full(len(cost) - 1, np.inf), 0.0)]
    for _ in range(num_stages):
        best.append(join(cost, best[-1][None, :]).min(axis=1))
    return best


def _divide(cost: Array, num_stages: int, join: np.ufunc, scale: float) -> Partition:
    """The first partition, by cut positions, whose joined cost is least (to a tiny fraction of `scale`)."""
    best = _least(cost, num_stages, join)
    counts, start = [], 0
    for left in range(num_stages, 0, -1):
        reached = join(cost[start], best[left - 1])
        end = int((reached <= best[left][start] + _TIE * scale).argmax())
        counts.append(end - start)
        start = end
    return Partition.from_counts(counts, len(cost) - 1)
