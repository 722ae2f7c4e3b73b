"""Ranks compare the data they are about to train on, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.runtime.collectives import exchange
from pipefit.runtime.session import Session

__all__ = ["Agreement"]

_CURE = (
    "every rank must be given the same batches in full: pipefit itself gives each replica its micro-batches, so use no "
    "DistributedSampler and no drop_last on some ranks only"
)


class Agreement:
    """What ranks compare once, with the first data of a run; afterwards it costs nothing."""

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
                "samples in the first batch": _samples(first[0]) if first else None,
            }
        )
        return chain(first, iterator)

    def batch(self, batch: Any) -> None:
        """Compares the size of a batch.

        Raises:
            DataError: on every rank with the same words: the sizes differ.
        """
        if self._is_due:
            self._compare({"samples in the first batch": _samples(batch)})

    def _compare(self, facts: dict[str, int | None]) -> None:
        self._is_due = False
        found = exchange(self._session, facts)
        for what in facts:
            values = [other.get(what) for other in found]
            rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if rank is not None:
                told = [f"rank {r} has {'none' if values[r] is None else values[r]}" for r in (0, rank)]
                raise DataError(f"{what}: {', '.join(told)}; {_CURE}")


def _samples(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(sizes, default=None)
