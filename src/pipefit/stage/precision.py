"""Mixed precision: the type in which stages compute and send, and the scale of the loss that preserves small gradients.

Weights, their gradients and the optimizer stay in float32. Under `bf16` or `fp16` layers run under torch's autocast.
Tensors that need a gradient are sent from stage to stage in the half type and converted to float32 there, so a message
has half the bytes and sums inside a stage lose nothing. The loss is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipefit.errors import look_up
from pipefit.ir.instruction import Indices
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.spec.files import JsonObject
from pipefit.spec.options import LARGEST_LOSS_SCALE

Half = torch.dtype | None
"""The type that autocast computes in; None: no autocast."""

TF32 = "tf32"
"""The precision whose products of float32 are rounded by a GPU; elsewhere it is fp32."""

PRECISIONS: dict[str, Half] = {"fp32": None, TF32: None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of a name; None: the model's own."""

_FIRST_SCALE = 2.0**16


def half_of(name: str) -> Half:
    """The half type of a precision by name; None for "fp32" and "tf32".

    Raises:
        PipefitError: another name; the nearest is suggested.
    """
    return look_up(name, PRECISIONS, "unknown precision")


def first_scale(half: Half, scale: float | None) -> float | None:
    """The first scale of the loss: the one given, or the usual one for a type that needs it."""
    if scale is None and half is torch.float16:
        return _FIRST_SCALE
    return scale


def in_float32(leaf: Tensor, half: Half) -> Tensor:
    """A tensor of the half type in float32, any other as it is."""
    if leaf.dtype == half:
        return leaf.float()
    return leaf


def widened(leaves: Sequence[Tensor], flags: Sequence[bool], half: Half) -> list[Tensor]:
    """The input from the stage before, in float32 where it carries a gradient."""
    return [in_float32(leaf, half) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]


def narrowed(leaves: Sequence[Tensor], flags: Sequence[bool], half: Half) -> list[Tensor]:
    """The output for the next stage, in the half type where it carries a gradient.

    Masks and tables of positions carry none and stay as they are: the least float32 would become −∞.
    """
    if half is None:
        return list(leaves)
    flagged = zip(leaves, flags, strict=True)
    return [leaf.to(half) if flag and leaf.dtype == torch.float32 else leaf for leaf, flag in flagged]


def scale_versions(program: Program) -> Indices:
    """For each update, the number of updates decided when its first loss is computed.

    The scale of an update's loss may depend only on these: it is then the same on every rank, and known to the last
    stage. An update that uses the weights of version v comes after the decision of update v − 1.
    """

    def found() -> Indices:
        header = program.header
        last = header.last_stage
        known = list(range(header.num_updates(last)))
        for _, _, i in program:
            if i.op is Op.FWD and i.stage == last:
                update = header.update_of(last, i.mb)
                known[update] = min(known[update], i.version)
        return tuple(known)

    return program.once("scale versions", found)


@dataclass
class LossScale:
    """The factor of the loss: halved when a gradient of an update is not finite, doubled after a run of good updates.

    Every rank keeps one and takes the same decisions, from the norm of all gradients, which is the same on all. The
    rule and its constants are those of `torch.amp.GradScaler`.

    Attributes:
        scale: the factor of the next update's loss.
        interval: consecutive good updates after which it doubles.
        streak: consecutive good updates so far.
        skipped: updates that were skipped since training began.
    """

    scale: float = _FIRST_SCALE
    interval: int = 2000
    streak: int = 0
    skipped: int = 0
    _after: list[float] = field(default_factory=list)
    _finite: dict[int, bool] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins a pass over a program."""
        self._after = [self.scale]
        self._finite = {}

    def of(self, program: Program, update: int) -> float:
        """The scale of an update's loss."""
        return self._after[scale_versions(program)[update]]

    def decide(self, update: int, norms: Tensor) -> bool:
        """Returns whether an update is taken; every rank calls this at its first step of each update, in order.

        Args:
            update: of the pass.
            norms: the squares of the norms of all ranks' gradients.
        """
        if update not in self._finite:
            finite = bool(torch.isfinite(norms).all())
            self._finite[update] = finite
            self.streak += 1
            if not finite:
                self.streak = 0
                self.skipped += 1
                self.scale *= 0.5
            elif self.streak == self.interval:
                self.streak = 0
                self.scale = min(2.0 * self.scale, LARGEST_LOSS_SCALE)
            self._after.append(self.scale)
        return self._finite[update]

    def state(self) -> JsonObject:
        """The state for a checkpoint."""
        return {"scale": self.scale, "streak": self.streak, "skipped": self.skipped}

    def load(self, state: JsonObject) -> None:
        """Takes the state from a checkpoint."""
        self.scale = float(state["scale"])
        self.streak = int(state["streak"])
        self.skipped = int(state["skipped"])
