"""The interface between the executor and whatever carries tensors from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.ir.instruction import Instruction


class Message(NamedTuple):
    """An activation or a gradient.

    Attributes:
        leaves: its tensors, detached; of a gradient, one for each leaf that carries one.
        flags: for each leaf of an activation, whether a gradient comes back.
        structure: of an activation's payload; None for a gradient.
        shapes: of the whole leaves, where these are pieces of them.
    """

    leaves: list[Tensor]
    flags: Sequence[bool] = ()
    structure: pytree.TreeSpec | None = None
    shapes: Sequence[torch.Size] = ()


Ending = Callable[[], bool]
"""Ends an operation under way: it waits until the result is where it belongs. Where nothing can be waited for, because
the other ranks live in this process too, it returns False and must be called again once they have gone on."""


def all_of(endings: Sequence[Ending]) -> Ending:
    """Ends several operations."""
    left = list(reversed(endings))

    def end() -> bool:
        while left and left[-1]():
            left.pop()
        return not left

    return end


class Transport(Protocol):
    """Carries messages and reductions for one rank.

    The members of a collective call it with the same key.
    """

    def begin(self, signatures: Sequence[object]) -> None:
        """A pass over a program begins; micro-batch k has shapes that `signatures[k]` identifies."""

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send; the tensors stay alive until it is done."""

    def receive(self, instruction: Instruction, deliver: Callable[[Message], None]) -> Ending:
        """Posts a receive; whoever waits for it has the message delivered."""

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> Ending:
        """Starts to sum tensors over some ranks, in place."""

    def reduce_scatter(self, members: tuple[int, ...], key: tuple[object, ...], whole: Tensor, part: Tensor) -> Ending:
        """Starts to sum a flat tensor over some ranks; this member's part of the sum goes to `part`."""

    def all_gather(self, members: tuple[int, ...], key: tuple[object, ...], part: Tensor, whole: Tensor) -> Ending:
        """Starts to join the members' parts in `whole`, in which `part` may lie."""
