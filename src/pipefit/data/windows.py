"""Batches of text windows: random, reproducible, and resumable from one small number."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipefit.data.position import Batch, Resumable, batch_seed
from pipefit.errors import DataError


class TextBatches(Resumable):
    """Batches (x, y) of windows of a corpus: x (batch, context) int64 and y the same, one byte later.

    Batch number i is a function of (seed, i): the position is the whole state, every rank can draw the same
    batch without a message, and a resumed run sees the batches of an uninterrupted one.

    Args:
        corpus: bytes, from `text` or `split_corpus`.
        batch: windows per batch.
        context: bytes per window.
        seed: the seed of the window starts.
        num_batches: batches until the iterator ends; None never ends.

    Raises:
        DataError: the corpus is shorter than one window and its next byte.
    """

    def __init__(self, corpus: bytes, batch: int, context: int, seed: int = 0, num_batches: int | None = None) -> None:
        if batch < 1 or context < 1:
            raise DataError(f"data: batch and context must be at least 1, got batch={batch}, context={context}")
        if len(corpus) < context + 1:
            raise DataError(
                f"data: the text has {len(corpus)} bytes, but one window needs context + 1 = {context + 1}; "
                "give more text or a smaller context"
            )
        # A bytearray, because torch warns about tensors over read-only memory.
        self._tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self._batch = batch
        self._context = context
        self._seed = seed
        self._end = num_batches
        self._identity = {"seed": seed, "batch": batch, "context": context, "corpus_bytes": len(corpus)}

    def __len__(self) -> int:
        """Batches from the start to the end; an endless stream has no length."""
        if self._end is None:
            raise TypeError("an endless TextBatches has no length; give num_batches")
        return self._end

    def __iter__(self) -> Iterator[Batch]:
        """Continues at the current position, which moves with every batch taken."""
        return self._until(self._end)

    def batch_at(self, index: int) -> Batch:
        """Batch number `index`, without moving the position."""
        generator = torch.Generator().manual_seed(batch_seed(self._seed, index))
        starts = torch.randint(0, len(self._tokens) - self._context, (self._batch,), generator=generator)
        windows = self._tokens[starts[:, None] + torch.arange(self._context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
