"""Arrays of samples in shuffled epochs, and a set of images."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipefit.data.position import Batch, Resumable, batch_seed
from pipefit.errors import DataError


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) float32 and their labels (n,) int64, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits(seed: int = 0) -> Digits:
    """1,797 handwritten digits (UCI "Optical recognition of handwritten digits", CC BY 4.0), 8 × 8 pixels.

    Pixels are standardised with the one mean and deviation of the training images.

    Args:
        seed: of the split.
    """
    table = _digits_table()
    x = torch.tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(table[:, -1], dtype=torch.int64)
    num_test = len(x) // 5
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held = order[:num_test]
    kept = order[num_test:]
    mean = x[kept].mean()
    deviation = x[kept].std()
    x = (x - mean) / deviation
    return Digits(x[kept], y[kept], x[held], y[held])


def _digits_table() -> np.ndarray:
    """One row per image: 64 pixels and the label."""
    packed = files("pipefit.data").joinpath("digits.csv.gz").read_bytes()
    return np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",")


class ArrayBatches(Resumable):
    """Batches (x, y) of samples; the order of each epoch is a function of (seed, epoch).

    Every pass of `for` ends with the epoch, and the next pass is the next epoch. A pass that was left in the middle
    (a break, or a resume) continues where it was.

    Args:
        x: samples along the first dimension.
        y: targets along the first dimension.
        batch: samples per batch.
        seed: of the orders.
        ragged: keep the last, smaller batch of an epoch; otherwise those samples wait for another epoch's order.

    Raises:
        DataError: no samples, unequal lengths, or a batch larger than the data when `ragged` is off.
    """

    def __init__(self, x: Tensor, y: Tensor, batch: int, seed: int = 0, ragged: bool = False) -> None:
        if len(x) != len(y):
            raise DataError(f"data: {len(x)} samples but {len(y)} targets")
        if len(x) == 0:
            raise DataError("data: no samples")
        if batch < 1 or (batch > len(x) and not ragged):
            raise DataError(f"data: batch must be between 1 and the {len(x)} samples, got {batch}")
        self._x = x
        self._y = y
        self._batch = batch
        self._seed = seed
        self._ragged = ragged
        sizes = {"batch": batch, "num_samples": len(x)}
        self._identity = {"seed": seed, **sizes, "shuffle": True, "ragged": ragged}
        self._cached: tuple[int, Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        """Batches per epoch."""
        if self._ragged:
            return -(-len(self._x) // self._batch)
        return len(self._x) // self._batch

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._position // len(self)

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch."""
        return self._until((self.epoch + 1) * len(self))

    def batch_at(self, index: int) -> Batch:
        """Batch number `index`, counted over all epochs, without moving the position."""
        rows = self.rows_at(index)
        return self._x[rows], self._y[rows]

    def rows_at(self, index: int) -> Tensor:
        """Numbers of the samples in batch number `index`."""
        epoch, within = divmod(index, len(self))
        return self._order(epoch)[within * self._batch : (within + 1) * self._batch]

    def _order(self, epoch: int) -> Tensor:
        if self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(batch_seed(self._seed, epoch))
            self._cached = (epoch, torch.randperm(len(self._x), generator=generator))
        return self._cached[1]
