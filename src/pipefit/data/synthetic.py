"""Random batches of the right shapes, for benchmarks, where the content of the data does not matter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pipefit.errors import DataError


def synthetic(example: Callable[[int, int], tuple[Any, Any]], batch: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Endless batches (x, y) made by a model's `example(batch, seed)`.

    A few batches are made once and then repeated, so that a benchmark does not measure their making.

    Args:
        example: gives random (x, y) for a batch size and a seed, as `ModelBundle.example` does.
        batch: samples per batch.
        seed: of the first batch; the others follow.
    """
    if batch < 1:
        raise DataError(f"data: batch must be at least 1, got {batch}")
    return itertools.cycle([example(batch, seed + index) for index in range(4)])
