"""The data of a training run: ranks compare it before the first step; long programs draw it when needed."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler

from pipefit.errors import DataError
from pipefit.runtime.collectives import exchange
from pipefit.runtime.microbatches import MicroBatch, Weigh, feed_of
from pipefit.runtime.session import Session

_KEPT_STEPS = 4
_MOST_IN_FLIGHT = 256
_SAMPLES = "samples in the first batch"
_CONTENT = "checksum of the first batch"
_CURE = (
    "every rank must be given the same batches in full: pipefit itself gives each replica its micro-batches, so use no "
    "DistributedSampler, no drop_last on some ranks only, and no random numbers that depend on the rank"
)


class DataComparison:
    """Compares the first data of a run among its ranks, once; later calls cost nothing.

    Args:
        session: of the run.
        seed: of the order of a loader that shuffles without its own generator.
    """

    def __init__(self, session: Session, seed: int = 0) -> None:
        self._session, self._seed = session, seed
        self._is_due = session.is_distributed

    def batches(self, batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
        """An iterator over the batches, after a check that all ranks have equally many and the same first one.

        A torch `DataLoader` without a generator is given one, so that it shuffles alike on every rank.

        Raises:
            DataError: on every rank with the same message: they differ.
        """
        _seed(batches, self._seed)
        iterator = iter(batches)
        if not self._is_due:
            return iterator
        first = list(islice(iterator, 1))
        self._compare(
            {
                "batches": len(batches) if isinstance(batches, Sized) else None,
                "steps": steps,
                _SAMPLES: _samples(first[0]) if first else None,
                _CONTENT: _checksum(first[0]) if first else None,
            }
        )
        return chain(first, iterator)

    def batch(self, batch: Any) -> None:
        """Compares a batch.

        Raises:
            DataError: on every rank with the same message: it differs.
        """
        if self._is_due:
            self._compare({_SAMPLES: _samples(batch), _CONTENT: _checksum(batch)})

    def _compare(self, facts: dict[str, int | None]) -> None:
        self._is_due = False
        found = exchange(self._session, facts)
        for what in facts:
            values = [other.get(what) for other in found]
            rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if rank is not None:
                each = [f"rank {r} has {'none' if values[r] is None else values[r]}" for r in (0, rank)]
                raise DataError(f"{what}: {', '.join(each)}; {_CURE}")


def _samples(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(sizes, default=None)


def _checksum(batch: Any) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    parts = [leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for leaf in leaves if leaf.numel()]
    return functools.reduce(lambda sofar, part: zlib.crc32(part, sofar), parts, 0)


def _seed(batches: Any, seed: int) -> None:
    """Gives its own generator to a loader that would shuffle by torch's global one, which differs among ranks."""
    if isinstance(batches, DataLoader) and batches.generator is None:
        batches.generator = torch.Generator().manual_seed(seed)
        if isinstance(batches.sampler, RandomSampler) and batches.sampler.generator is None:
            batches.sampler.generator = batches.generator


class BatchStream:
    """The feed of a program of many steps: draws (input, target) batches in order, one for each step.

    Args:
        batches: as many as the program has steps.
        num_microbatches: of a step.
        first_ordinal: number of the first micro-batch since training began.
        weigh: from a target to the weight of its micro-batch.
    """

    def __init__(
        self, batches: Iterator[Any], num_microbatches: int, first_ordinal: int, weigh: Weigh | None = None
    ) -> None:
        self._batches, self._size, self._first, self._weigh = batches, num_microbatches, first_ordinal, weigh
        # A micro-batch has left the pipeline long before this many later ones have entered it.
        most_steps = _KEPT_STEPS + -(-_MOST_IN_FLIGHT // num_microbatches)
        self._kept: deque[MicroBatch] = deque(maxlen=most_steps * num_microbatches)
        self._drawn = 0

    def __getitem__(self, mb: int) -> MicroBatch:
        step = mb // self._size
        while self._drawn <= step:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise DataError(
                    f"the data ended after {self._drawn} batches, before step {step}; give `steps` at most that many"
                ) from None
            ordinal = self._first + self._drawn * self._size
            self._kept += feed_of(batch, self._size, ordinal, "train", self._weigh)
            self._drawn += 1
        return self._kept[mb - self._drawn * self._size]
