"""Random batches of the right shapes, for benchmarks, where the content of the data does not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipefit.data.position import Resumable
from pipefit.errors import DataError


class SyntheticBatches(Resumable):
    """Endless batches (x, y) made by a model's `example(batch, seed)`.

    A few batches are made once and then repeated, so that a benchmark does not measure their making.

    Args:
        example: gives random (x, y) for a batch size and a seed, as `ModelBundle.example` does.
        batch: samples per batch.
        seed: the seed of the first batch; the others follow.
    """

    def __init__(self, example: Callable[[int, int], tuple[Any, Any]], batch: int, seed: int = 0) -> None:
        if batch < 1:
            raise DataError(f"data: batch must be at least 1, got {batch}")
        self._identity = {"seed": seed, "batch": batch}
        self._made = [example(batch, seed + index) for index in range(4)]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Continues at the current position, which moves with every batch taken."""
        return self._until(None)

    def batch_at(self, index: int) -> tuple[Any, Any]:
        """Batch number `index`, without moving the position."""
        return self._made[index % len(self._made)]
