"""The types between the executor and the two transports, which carry tensors from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.stage.opened import Rest
from pipefit.stage.payload import Structure, unflatten


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
    structure: Structure | Rest | None = None
    shapes: Sequence[torch.Size] = ()

    def as_inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves of an activation where a new graph begins, and those among them that need a gradient."""
        leaves = list(self.leaves)
        needed = []
        for index, flag in enumerate(self.flags):
            if flag:
                leaves[index] = leaves[index].detach().requires_grad_()
                needed.append(leaves[index])
        return leaves, needed

    def payload(self, leaves: list[Tensor] | None = None) -> Any:
        """The activation in its own structure, of other leaves where they are given."""
        assert self.structure is not None
        return unflatten(self.leaves if leaves is None else leaves, self.structure)


Ending = Callable[[], bool]
"""Ends an asynchronous operation: it waits until the result is in place. Where it cannot wait, because the other ranks
are in this process too, it returns False and must be called again after they have continued."""


def then(end: Ending, action: Callable[[], object]) -> Ending:
    """Ends an operation and then does something with its result."""

    def both() -> bool:
        if not end():
            return False
        action()
        return True

    return both


def all_of(endings: Sequence[Ending]) -> Ending:
    """Ends several operations."""
    left = list(reversed(endings))

    def end() -> bool:
        while left and left[-1]():
            left.pop()
        return not left

    return end
