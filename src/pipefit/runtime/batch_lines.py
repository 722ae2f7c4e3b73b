"""Lines about batches, which go ahead of their first activations, so that ranks with different batches find out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.parallel.alike import LINE, check
from pipefit.parallel.waiting import finish
from pipefit.runtime.microbatches import Feed


class BatchLines:
    """The lines of a pass on the links of a process: one for each batch and link.

    Args:
        process: its number.
        group: the group of all processes.
        tag: the tag of the lines.
    """

    def __init__(self, process: int, group: dist.ProcessGroup, tag: int) -> None:
        self._process = process
        self._group = group
        self._tag = tag
        self._feed: Feed = []
        # By peer and the batch's first micro-batch: lines sent, and lines that are being received (None: compared).
        self._sent: set[tuple[int, int]] = set()
        self._expected: dict[tuple[int, int], tuple[Tensor, Any] | None] = {}

    def begin(self, feed: Feed) -> None:
        """Begins a pass."""
        self._feed = feed
        self._sent.clear()
        self._expected.clear()

    def send(self, mb: int, peer: int) -> tuple[Tensor, Any] | None:
        """Sends the line of a micro-batch's batch, unless the peer has it; returns it and the work to wait for."""
        batch = self._feed[mb].batch
        if batch is None or (peer, batch.first) in self._sent:
            return None
        self._sent.add((peer, batch.first))
        line = batch.line
        return line, self._group.send([line], peer, self._tag)

    def expect(self, mb: int, peer: int) -> None:
        """Posts the receive of the line that goes ahead of an activation."""
        batch = self._feed[mb].batch
        if batch is not None and (peer, batch.first) not in self._expected:
            line = torch.empty(LINE, dtype=torch.uint8)
            self._expected[peer, batch.first] = line, self._group.recv([line], peer, self._tag)

    def compare(self, mb: int, peer: int) -> None:
        """Compares a batch with that of the sender of an activation.

        Raises:
            DataError: they have different shapes.
        """
        batch = self._feed[mb].batch
        if batch is not None and (expected := self._expected[peer, batch.first]) is not None:
            self._expected[peer, batch.first] = None
            line, work = expected
            finish(work)
            check(self._process, batch.line, peer, line)
