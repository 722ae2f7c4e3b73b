"""The data of a training: ranks compare what they were given before the first step; long programs draw it as needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.runtime.collectives import exchange
from pipefit.runtime.microbatches import MicroBatch, Weigh, feed_of
from pipefit.runtime.session import Session

_KEPT_STEPS = 4
_MOST_IN_FLIGHT = 256
_SAMPLES = "samples in the first batch"
_CURE = (
    "every rank must be given the same batches in full: pipefit itself gives each replica its micro-batches, so use no "
    "DistributedSampler and no drop_last on some ranks only"
)


class DataComparison:
    """Compares the first data of a run among its ranks, once; afterwards it costs nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_due = session.is_distributed

    def batches(self, batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
        """An iterator over the batches; all ranks bring as many, and a first one of the same size.

        Raises:
            DataError: on every rank with the same words: they do not.
        """
        iterator = iter(batches)
        if not self._is_due:
            return iterator
        first = list(islice(iterator, 1))
        self._compare(
            {
                "batches": len(batches) if isinstance(batches, Sized) else None,
                "steps": steps,
                _SAMPLES: _samples(first[0]) if first else None,
            }
        )
        return chain(first, iterator)

    def batch(self, batch: Any) -> None:
        """Compares the size of a batch.

        Raises:
            DataError: on every rank with the same words: the sizes differ.
        """
        if self._is_due:
            self._compare({_SAMPLES: _samples(batch)})

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


class BatchStream:
    """The feed of a program of many steps: draws (input, target) batches in order, each one step's worth.

    Args:
        batches: as many as the program has steps.
        num_microbatches: of a step.
        first_ordinal: number of the first micro-batch since training began.
        weigh: how much a micro-batch counts.
    """

    def __init__(
        self, batches: Iterator[Any], num_microbatches: int, first_ordinal: int, weigh: Weigh | None = None
    ) -> None:
        self._batches, self._size, self._first, self._weigh = batches, num_microbatches, first_ordinal, weigh
        # A micro-batch is out of the pipeline long before this many later ones have entered it.
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
