"""Consecutive layers into stages: the slowest stage as fast as can be, each within the memory of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Costs closer than this, relatively, are a tie: sums in another order differ by as much.
_TIE = 1e-12


def spans(figures: Sequence[float]) -> Array:
    """Array [a, b]: the sum over the items a…b−1; 0 where there are none."""
    import numpy as np

    total = np.concatenate(([0.0], np.cumsum(np.asarray(figures, dtype=np.float64))))
    between: Array = np.maximum(total[None, :] - total[:, None], 0.0)
    return between


def divide(costs: Sequence[Array]) -> list[int] | None:
    """Layer counts of the stages; None when no division is allowed.

    Least maximum; among those least sum of squares; among those the earliest cuts.

    Args:
        costs: of each stage k an array [a, b], its cost if it holds the layers a…b−1; infinite: not allowed. One array
            object may serve many stages.
    """
    import numpy as np

    num_layers = len(costs[0]) - 1
    shape = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), 1)
    ready = {id(cost): np.where(shape, cost, np.inf) for cost in costs}
    rows = [ready[id(cost)] for cost in costs]
    worst = float(_best(rows, np.maximum)[0][0])
    if not np.isfinite(worst):
        return None
    limit = worst * (1 + _TIE)
    squares = {key: np.where(cost <= limit, cost**2, np.inf) for key, cost in ready.items()}
    rows = [squares[id(cost)] for cost in costs]
    best = _best(rows, np.add)
    counts, start = [], 0
    for stage, row in enumerate(rows):
        reached = row[start] + best[stage + 1]
        end = int((reached <= best[stage][start] + _TIE * worst**2).argmax())
        counts.append(end - start)
        start = end
    return counts


def _best(rows: list[Array], join: np.ufunc) -> list[Array]:
    """best[k][a]: the least joined cost of the layers from a on in the stages from k on."""
    import numpy as np

    after = np.append(np.full(len(rows[0]) - 1, np.inf), 0.0)
    best = [after]
    for row in reversed(rows):
        after = join(row, after[None, :]).min(axis=1)
        best.append(after)
    return best[::-1]
