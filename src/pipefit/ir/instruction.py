"""One instruction, as data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipefit.ir.op import OP_SPEC, Op

PREFIX = {"stage": "s", "mb": "m", "version": "w", "slot": "@"}
"""Letters before the numbers of operands, in text."""


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """An operation and its operands; −1 and "" where the operation has none.

    Attributes:
        op: the operation.
        stage: global stage index, from 0 at the input.
        mb: global micro-batch index within the program.
        version: a version of the stage's weights; for `reduce` and `step` also the index of the update whose gradients
            are meant.
        kind: the kind of the value moved, or of the reduction.
        peer: the other rank of a message.
        tier: "host" or "disk".
        slot: the slot of the device that a fetch fills.
    """

    op: Op
    stage: int = -1
    mb: int = -1
    version: int = -1
    kind: str = ""
    peer: int = -1
    tier: str = ""
    slot: int = -1

    def __str__(self) -> str:
        operands = map(self._operand, OP_SPEC[self.op].fields)
        return " ".join([self.op.value, *operands])

    def _operand(self, field: str) -> str:
        if field == "peer":
            return f"{arrow(self.op)}{self.peer}"
        value = getattr(self, field)
        prefix = PREFIX.get(field, "")
        if prefix:
            if value >= 0:
                return f"{prefix}{value}"
            return f"{prefix}*"
        return str(value)

    @property
    def short(self) -> str:
        """Its name in drawings and `--json`: "F0.3" is the forward of stage 0 on micro-batch 3."""
        return f"{OP_SPEC[self.op].letter or self.op.value}{self.stage}.{self.mb}"


def arrow(op: Op) -> str:
    """The sign before the peer of a message: to the rank, or from it."""
    if op is Op.SEND:
        return ">"
    return "<"


def fwd(stage: int, mb: int) -> Instruction:
    """A forward whose version a pass will set."""
    return Instruction(Op.FWD, stage, mb)


def bwd(stage: int, mb: int) -> Instruction:
    """A full backward whose version a pass will set."""
    return Instruction(Op.BWD, stage, mb)


def bwd_input(stage: int, mb: int) -> Instruction:
    """The input half of a backward."""
    return Instruction(Op.BWD_INPUT, stage, mb)


def bwd_weight(stage: int, mb: int) -> Instruction:
    """The weight half of a backward."""
    return Instruction(Op.BWD_WEIGHT, stage, mb)


def forward_backward(stage: int, mbs: Sequence[int]) -> list[Instruction]:
    """A forward and its backward for each micro-batch."""
    return [op(stage, mb) for mb in mbs for op in (fwd, bwd)]


Instructions = Sequence[Instruction]
"""The instructions of a rank, in order."""

StageAt = tuple[int, int]
"""A stage, and one of its micro-batches, updates or versions."""

StageNumbers = dict[StageAt, int]
"""An index or a version for each of some stages and their micro-batches, updates or versions."""

ValueKey = tuple[str, int, int]
"""The kind, the stage and the micro-batch of a value."""

Indices = tuple[int, ...]
"""Stages, ranks, micro-batches or instructions, by their numbers."""

Groups = tuple[Indices, ...]
"""Several of these together, such as the ranks of each stage, or stages that share a weight."""
