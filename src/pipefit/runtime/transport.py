"""The interface between the executor and whatever carries tensors from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.ir.instruction import Instruction


class Message(NamedTuple):
    """An activation or a gradient on its way.

    Attributes:
        leaves: its tensors, detached; of a gradient, one for each leaf that carries one.
        flags: for each leaf of an activation, whether a gradient comes back.
        structure: of an activation's payload; None for a gradient.
    """

    leaves: list[Tensor]
    flags: list[bool]
    structure: pytree.TreeSpec | None


class Handle(Protocol):
    """An operation under way."""

    def ready(self) -> bool:
        """Whether `wait` would return at once. A transport that can block says True."""

    def wait(self) -> Any:
        """Waits for its end: the result is then where it belongs. A receive returns its `Message`."""


class Transport(Protocol):
    """Carries messages and reductions for the ranks of this process."""

    rank: int

    def begin(self, signatures: Sequence[object]) -> None:
        """A pass over a program begins; micro-batch k has shapes that `signatures[k]` identifies."""

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send; the tensors stay alive until it is done."""

    def receive(self, instruction: Instruction) -> Handle:
        """Posts a receive."""

    def delivered(self, kind: str, stage: int, mb: int) -> None:
        """The receiver has used the message that was sent under this name: its tensors are released."""

    def gather(self, pieces: Any) -> Message:
        """Puts together what arrived in pieces; only for ranks of several processes."""

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> Handle:
        """Starts to sum tensors over some ranks, each of which calls this with the same key.

        Once waited for, the tensors hold the sums.
        """

    def reduce_scatter(self, members: tuple[int, ...], key: tuple[object, ...], whole: Tensor, part: Tensor) -> Handle:
        """Starts to sum a flat tensor over some ranks; once waited for, this member's part of it holds the sum."""

    def all_gather(self, members: tuple[int, ...], key: tuple[object, ...], part: Tensor, whole: Tensor) -> Handle:
        """Starts to join the members' parts; once waited for, `whole` holds them all. `part` may lie in it."""
