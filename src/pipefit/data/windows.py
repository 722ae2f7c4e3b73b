"""Batches of text windows: random, reproducible, and resumable from one small number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipefit.data.corpus import as_tokens
from pipefit.errors import DataError

__all__ = ["TextBatches"]


class TextBatches:
    """Batches (x, y) of windows of a corpus: x (batch, context) int64 and y the same, one byte later.

    Batch number i is a function of (seed, i) alone: the position is the whole state, every rank can draw the same
    batch without a message, and a resumed run sees what an uninterrupted one would have seen.

    Args:
        corpus: bytes, from `text` or `split_corpus`.
        batch: windows per batch.
        context: bytes per window.
        seed: of the window starts.
        num_batches: batches until the iterator ends; None never ends.
        sequential: windows side by side from the start of the corpus instead of random ones (for evaluation); the
            iterator ends with the corpus, and the last batch may be smaller.

    Raises:
        DataError: the corpus is shorter than one window and its next byte.
    """

    def __init__(
        self,
        corpus: bytes,
        batch: int,
        context: int,
        seed: int = 0,
        num_batches: int | None = None,
        sequential: bool = False,
    ) -> None:
        if batch < 1 or context < 1:
            raise DataError(f"data: batch and context must be at least 1, got batch={batch}, context={context}")
        if len(corpus) < context + 1:
            raise DataError(
                f"data: the text has {len(corpus)} bytes, but one window needs context + 1 = {context + 1}; "
                "give more text or a smaller context"
            )
        self._tokens = as_tokens(corpus)
        self._batch, self._context, self._seed = batch, context, seed
        self._sequential = sequential
        num_windows = (len(corpus) - 1) // context
        whole = -(-num_windows // batch) if sequential else None
        limits = [limit for limit in (whole, num_batches) if limit is not None]
        self._end = min(limits) if limits else None
        self._position = 0

    def __len__(self) -> int:
        """Batches from the start to the end; an endless stream has no length."""
        if self._end is None:
            raise TypeError("an endless TextBatches has no length; give num_batches")
        return self._end

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Continues at the current position, which moves with every batch taken."""
        while self._end is None or self._position < self._end:
            index = self._position
            self._position += 1
            yield self.batch_at(index)

    def batch_at(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`, without moving the position."""
        starts = self._starts(index)
        windows = self._tokens[starts[:, None] + torch.arange(self._context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _starts(self, index: int) -> Tensor:
        last_start = len(self._tokens) - self._context - 1
        if self._sequential:
            num_windows = (len(self._tokens) - 1) // self._context
            first = index * self._batch
            return torch.arange(first, min(first + self._batch, num_windows)) * self._context
        generator = torch.Generator().manual_seed(batch_seed(self._seed, index))
        return torch.randint(0, last_start + 1, (self._batch,), generator=generator)

    def reset(self) -> None:
        """Goes back to the first batch."""
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: position and seed, and the sizes the position counts in."""
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`.

        Raises:
            DataError: the state belongs to other data, seed or sizes, so the position would mean other batches.
        """
        self._position = resume_position(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "batch": self._batch,
            "context": self._context,
            "corpus_bytes": len(self._tokens),
        }


def batch_seed(seed: int, index: int) -> int:
    """One 63-bit seed from a pair, so that neighbouring pairs share nothing (splitmix64's finisher)."""
    mask = (1 << 64) - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1


def resume_position(state: dict[str, Any], identity: dict[str, Any]) -> int:
    """The position held in `state`, if the state was taken from data of the same `identity`."""
    missing = [key for key in ("position", *identity) if key not in state]
    if missing:
        raise DataError(f"data: the saved position lacks {', '.join(missing)}; it is not a state of these batches")
    other = [f"{key} was {state[key]!r}, is {now!r}" for key, now in identity.items() if state[key] != now]
    if other:
        raise DataError(f"data: cannot resume, because the data differ: {'; '.join(other)}")
    return int(state["position"])
