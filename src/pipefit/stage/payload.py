"""Payloads between stages: any pytree of tensors and plain values, flattened to its tensors for sending."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError
from pipefit.stage.opened import Rest, opened
from pipefit.stage.record_layout import name_of

ONLY_SHAPES = "a stage's output may depend only on the shape of the model's input"
"""The rule that lets both ends of a link agree on shapes once, for messages."""

_PLAIN = (NoneType, bool, int, float, str)
"""Values that are part of a payload's structure."""


def is_plain(value: Any) -> bool:
    """Returns whether a leaf is part of the structure: None, or a bool, int, float or str."""
    return type(value) in _PLAIN


@dataclass(frozen=True)
class Structure:
    """A payload without its tensors.

    Attributes:
        tree: of its leaves.
        values: JSON of [position, value] of the leaves that are plain values; "": there are none. It is compared as
            text, where 1, 1.0 and true differ.
        plain: the same, read.
    """

    tree: pytree.TreeSpec
    values: str = ""
    plain: tuple[tuple[int, Any], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, tree: pytree.TreeSpec, values: str) -> Structure:
        """The structure with plain values from their text."""
        if not values:
            return cls(tree)
        return cls(tree, values, tuple(map(tuple, json.loads(values))))

    def dumps(self) -> str:
        """Its text."""
        return json.dumps([pytree.treespec_dumps(self.tree), self.values])

    @classmethod
    def loads(cls, text: str) -> Structure:
        """Reads a text, in the form that `unflatten` expects."""
        tree, values = json.loads(text)
        read = cls.of(pytree.treespec_loads(tree), values)
        if read == _LEAF:
            return _LEAF
        return read


_LEAF = Structure(pytree.tree_flatten(None)[1])


def _is_known(payload: Any) -> bool:
    """Returns whether it consists of tensors and plain values."""
    return all(isinstance(leaf, Tensor) or is_plain(leaf) for leaf in pytree.tree_leaves(payload))


def flatten_any(payload: Any, where: str) -> tuple[list[Tensor], Structure | Rest]:
    """The tensors of a payload that no other stage gets, and its structure; it may hold objects of any class.

    Raises:
        ModelError: an object cannot be opened.
    """
    if _is_known(payload):
        return flatten(payload, where)
    try:
        return opened(payload)
    except Exception as problem:
        raise ModelError(
            f"{where} holds an object whose tensors cannot be found ({problem}); use tensors, tuples, lists, dicts or "
            "dataclasses of them"
        ) from problem


def leaves_of(output: Any) -> list[Any]:
    """The leaves of a model's output; where it holds objects of other classes, the tensors in all of it.

    Raises:
        ModelError: an object cannot be opened.
    """
    if _is_known(output):
        return pytree.tree_leaves(output)
    return flatten_any(output, "the output of the model")[0]


def flatten(payload: Any, where: str = "a payload") -> tuple[list[Tensor], Structure]:
    """The tensors of a payload and its structure.

    Raises:
        ModelError: a leaf is neither a tensor nor a plain value, so it could not be sent to another stage.
    """
    if isinstance(payload, Tensor):
        return [payload], _LEAF
    leaves, tree = pytree.tree_flatten(payload)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) == len(leaves):
        return tensors, Structure(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and not is_plain(leaf):
            raise ModelError(
                f"{where} holds a {type(leaf).__name__} ({leaf!r:.60}); between layers only tensors and plain values "
                "(None, bool, int, float, str) can flow, single or in tuples, lists and dicts: turn it into a tensor, "
                "or keep it inside one layer"
            )
    plain = [[position, leaf] for position, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
    return tensors, Structure.of(tree, json.dumps(plain))


def unflatten(leaves: list[Tensor], structure: Structure | Rest) -> Any:
    """The payload of some tensors; the inverse of `flatten` and `flatten_any`."""
    if isinstance(structure, Rest):
        return structure.closed(leaves)
    if structure is _LEAF:
        return leaves[0]
    whole = list(leaves)
    for position, value in structure.plain:
        whole.insert(position, value)
    return pytree.tree_unflatten(whole, structure.tree)


def check_values(stage: int, mb: int, known: Structure, found: Structure) -> None:
    """Compares the plain values of a stage's output with those of an earlier micro-batch of the same shape.

    Raises:
        ModelError: they differ; the ranks have agreed on the earlier ones.
    """
    if known.values == found.values:
        return
    before, now = "it", "at another place"
    for (_, one), (_, other) in zip_longest(known.plain, found.plain, fillvalue=(0, None)):
        if repr(one) != repr(other):
            before, now = repr(one), repr(other)
            break
    raise ModelError(
        f"stage {stage} gave the value {now} for micro-batch {mb}, but {before} for an earlier input of the same "
        "shape; values that are no tensors are agreed on once: turn one that changes into a tensor"
    )


def sent(output: Any) -> Any:
    """The part of a layer's output that is sent: for a cut model without the batch, which every rank has."""
    if isinstance(output, dict) and output.keys() == {"batch", "values", "carried"}:
        return output | {"batch": ()}
    return output


def carries_gradient(leaf: Tensor) -> bool:
    """Returns whether a gradient will come back for this output of a stage."""
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Contract:
    """Shapes, types and structure of a stage's output; both ends of a link hold the same.

    Attributes:
        structure: of the payload, with its plain values.
        leaves: (shape, dtype, whether a gradient comes back) of each tensor.
    """

    structure: Structure
    leaves: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    @classmethod
    def of(cls, leaves: Sequence[Tensor], flags: Sequence[bool], structure: Structure) -> Contract:
        """The contract that a payload fulfils."""
        shapes = ((leaf.shape, leaf.dtype, flag) for leaf, flag in zip(leaves, flags, strict=True))
        return cls(structure, tuple(shapes))

    def to_bytes(self) -> bytes:
        """The bytes of the announcement before the first message of each shape."""
        leaves = [[list(shape), name_of(dtype), flag] for shape, dtype, flag in self.leaves]
        return json.dumps([self.structure.dumps(), leaves]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contract:
        """Reads an announcement."""
        structure, leaves = json.loads(data)
        read = ((torch.Size(shape), getattr(torch, dtype), flag) for shape, dtype, flag in leaves)
        return cls(Structure.loads(structure), tuple(read))

    def __str__(self) -> str:
        return ", ".join(f"{name_of(dtype)}{list(shape)}" for shape, dtype, _ in self.leaves)
