"""Costs of communication in PipeDream's partitioner, by named convention: published results depend on it.

Legend: m replicas of a stage, W its weight bytes, B bandwidth of the level, C its time on one component, g components
of the level below, a bytes across a cut, m_left and m_right the replicas on the cut's two sides.

| convention | stage on m components, seconds per mini-batch | cut |
|---|---|---|
| paper | max(C, 2(m−1)·W/B) / m | 2a/B |
| ring | max(C, 2(m−1)/m·W/B) / m | 2a/(B·min(m_left, m_right)) |
| pipedream-code | (C + D(m)) / m, D(m) = 4(m−1)·W/(B·m); D/g in the first stage of a level | as ring |

`paper` is the formula as printed (Narayanan et al., SOSP 2019, section 3.1). `ring` counts the bytes that a ring
all-reduce sends, once per m mini-batches. `pipedream-code` is the cost of the released optimizer with activation costs
enabled. In addition to the table, it counts no sending for the first stage of a level, counts sending out of the level
for the last of several stages unless the model ends there, and uses all M workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Levels = list[tuple[int, float]]
"""Width, and bandwidth in bytes per second, of each level from the inside."""


@dataclass(frozen=True)
class Convention:
    """A convention for the cost of communication.

    Attributes:
        divides: a cut's bytes are shared by the replicas of either side.
        released: whether it is that of the released optimizer, as described above.
    """

    divides: bool = True
    released: bool = False


CONVENTIONS = {
    "paper": Convention(divides=False),
    "ring": Convention(),
    "pipedream-code": Convention(released=True),
}


def stage_s(
    rule: Convention, compute_s: Any, trained_bytes: Any, replicas: Any, bandwidth: float, below: int, first: bool
) -> Any:
    """Seconds per mini-batch of a stage on `replicas` components (numbers or arrays; infinite stays infinite).

    Args:
        rule: the convention.
        compute_s: seconds per mini-batch on one component.
        trained_bytes: the bytes of the stage's weights that train.
        replicas: m.
        bandwidth: the bandwidth of the level, bytes per second.
        below: components of the level below (1 for devices).
        first: the stage is the first of its level, or its only one.
    """
    share = 1
    if rule.divides:
        share = replicas
    factor = 2
    if rule.released:
        factor = 4
    reduction = factor * (replicas - 1) * trained_bytes / (bandwidth * share)
    if not rule.released:
        return np.maximum(compute_s, reduction) / replicas
    if first:
        reduction = reduction / below
    return (compute_s + reduction) / replicas


def data_parallel_s(rule: Convention, total_s: float, trained_bytes: float, levels: Levels) -> float:
    """Seconds per mini-batch of plain data parallelism over all levels (width, bandwidth), folded from the inside."""
    time_s = total_s
    below = 1
    for width, bandwidth in levels:
        time_s = float(stage_s(rule, time_s, trained_bytes, width, bandwidth, below, first=True))
        below = width
    return time_s
