"""Payloads between stages: any pytree of tensors, flattened to its leaves for sending."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError

_LEAF = pytree.tree_flatten(None)[1]


def flatten(payload: Any, where: str = "a payload") -> tuple[list[Tensor], pytree.TreeSpec]:
    """The tensors of a payload and its structure.

    Raises:
        ModelError: a leaf is not a tensor, so it could not be sent to another stage.
    """
    if isinstance(payload, Tensor):
        return [payload], _LEAF
    leaves, structure = pytree.tree_flatten(payload)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"{where} holds a {type(leaf).__name__} ({leaf!r:.60}); between layers only tensors can flow, "
                "single or in tuples, lists and dicts: turn it into a tensor, or keep it inside one layer"
            )
    return leaves, structure


def unflatten(leaves: list[Tensor], structure: pytree.TreeSpec) -> Any:
    """The payload of some leaves; the inverse of `flatten`."""
    return leaves[0] if structure is _LEAF else pytree.tree_unflatten(leaves, structure)


def read_structure(text: str) -> pytree.TreeSpec:
    """The structure of a payload from its text, in the form that `unflatten` expects."""
    structure = pytree.treespec_loads(text)
    return _LEAF if structure == _LEAF else structure


def sent(output: Any) -> Any:
    """The part of a layer's output that is sent: for a cut model without the batch, which every rank has."""
    of_cut = isinstance(output, dict) and output.keys() == {"batch", "values", "carried"}
    return output | {"batch": ()} if of_cut else output


def carries_gradient(leaf: Tensor) -> bool:
    """Returns whether a gradient will come back for this output of a stage."""
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Contract:
    """Shapes, types and structure of a stage's output; both ends of a link hold the same.

    Attributes:
        structure: of the payload.
        leaves: (shape, dtype, whether a gradient comes back) of each tensor.
    """

    structure: pytree.TreeSpec
    leaves: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    @classmethod
    def of(cls, leaves: list[Tensor], flags: list[bool], structure: pytree.TreeSpec) -> Contract:
        """The contract that a payload fulfils."""
        shapes = ((leaf.shape, leaf.dtype, flag) for leaf, flag in zip(leaves, flags, strict=True))
        return cls(structure, tuple(shapes))

    def to_bytes(self) -> bytes:
        """The bytes of the announcement before the first message of each shape."""
        leaves = [[list(shape), str(dtype).removeprefix("torch."), flag] for shape, dtype, flag in self.leaves]
        return json.dumps([pytree.treespec_dumps(self.structure), leaves]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contract:
        """Reads an announcement."""
        structure, leaves = json.loads(data)
        return cls(
            read_structure(structure),
            tuple((torch.Size(shape), getattr(torch, dtype), flag) for shape, dtype, flag in leaves),
        )

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype, _ in self.leaves)
