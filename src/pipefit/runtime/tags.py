"""The tags of messages between processes: a receive gets the message of its own tag, whatever arrives before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind


@dataclass
class Tags:
    """The tags of a pass. Those of the leaves of activations and gradients have six digits, the highest first.

            batch     micro-batch     stage     pass     kind       leaf
        │ 0 … M − 1 │   0 … 255   │ 0 … S − 1 │ 0 1 │ act grad │ 0 … 63 │

        M · 256 · S · 2 · 2 · 64 + 2 · stage    the head of a contract; its text has the next tag
        2³¹ − 1                                 a line about a batch

    Passes alternate, so that a message of one is not taken for one of the next. Micro-batches whose numbers differ by
    256 share tags: messages of one tag arrive in order. The batch is a checksum of its shapes, modulo M: messages of
    different batches do not match.

    Attributes:
        num_stages: of the model, S.
        parity: of the pass.
    """

    MOST_LEAVES: ClassVar[int] = 64
    LINES: ClassVar[int] = 2**31 - 1
    _MICROBATCHES: ClassVar[int] = 256

    num_stages: int
    parity: int = 0

    @property
    def _of_a_batch(self) -> int:
        """The number of tags of one batch."""
        return self._MICROBATCHES * self.num_stages * 2 * 2 * self.MOST_LEAVES

    @property
    def _num_batches(self) -> int:
        """The number of batches with tags of their own, M."""
        return max((self.LINES - 2 * self.num_stages) // self._of_a_batch, 1)

    def leaf(self, i: Instruction, kind: str, checksum: int) -> int:
        """The tag of the first leaf of a message; those of the others follow.

        Args:
            i: sends or receives it.
            kind: of the whole value.
            checksum: of the shapes of its batch.
        """
        tag = checksum % self._num_batches
        tag = tag * self._MICROBATCHES + i.mb % self._MICROBATCHES
        tag = tag * self.num_stages + i.stage
        tag = tag * 2 + self.parity
        tag = tag * 2 + (kind == Kind.GRAD)
        return tag * self.MOST_LEAVES

    def contract(self, stage: int) -> int:
        """The tag of the head of a contract; that of its text follows."""
        return self._num_batches * self._of_a_batch + 2 * stage
