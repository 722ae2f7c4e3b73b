"""Payloads between layers: a tensor or any nesting of tuples, lists and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.errors import DataError, ModelError
from pipefit.stage.record_layout import name_of
from pipefit.stage.split import NamedLayer, joined

T = TypeVar("T", bound=Tensor)

Run = Callable[[Any], Any]
"""The forward of a layer, from one payload to the next."""


def tensors_of(payload: Any) -> list[Tensor]:
    """The tensors of a payload, in order."""
    return [leaf for leaf in pytree.tree_leaves(payload) if isinstance(leaf, Tensor)]


def graded(tensors: Iterable[T]) -> list[T]:
    """Those of some tensors that have gradients."""
    return [tensor for tensor in tensors if tensor.requires_grad]


def parameters_of(layers: Iterable[NamedLayer]) -> list[nn.Parameter]:
    """The parameters of some layers, a shared one once."""
    return list(joined(layers).parameters())


def map_tensors(function: Callable[[Tensor], Any], payload: Any) -> Any:
    """The payload with every tensor replaced by `function` of it."""
    return pytree.tree_map_only(Tensor, function, payload)


def cut_off(tensor: Tensor) -> Tensor:
    """A copy without the graph that made it; not a leaf, because leaves refuse changes in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def in_graph(tensor: Tensor) -> Tensor:
    """A copy of a tensor that needs a gradient, which a layer may change in place, unlike a leaf of the graph."""
    if tensor.requires_grad:
        return tensor.clone()
    return tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements, as they would travel."""
    return sum(tensor.nbytes for tensor in tensors)


def batch_of(payload: Any) -> int:
    """Samples in a payload: the first dimension of its first tensor that has one.

    Raises:
        DataError: there is no such tensor.
    """
    for tensor in tensors_of(payload):
        if tensor.dim():
            return tensor.shape[0]
    raise DataError("the example input has no tensor with a batch dimension: its micro-batch size is unknown")


def take(payload: Any, count: int, batch: int) -> Any:
    """The first `count` samples; tensors whose first dimension is not `batch` (a shared mask) stay whole."""
    if count == batch:
        return payload

    def first(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == batch:
            # In memory of its own, which is counted where a layer saves it.
            return tensor[:count].clone()
        return tensor

    return map_tensors(first, payload)


def placed(payload: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The payload on a device, cut off from any graph; floating tensors in `dtype`."""

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kind = dtype
        else:
            kind = None
        return tensor.detach().to(device=device, dtype=kind)

    return map_tensors(place, payload)


def call_layer(name: str, layer: Run, payload: Any) -> Any:
    """Calls a layer; an exception becomes a `ModelError` with the layer's name and its input."""
    try:
        return layer(payload)
    except Exception as error:
        raise ModelError(f"layer {name!r} raised {type(error).__name__} on {describe(payload)}: {error}") from error


def describe(payload: Any) -> str:
    """Shapes and types for a message.

    >>> describe((torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)))
    'float32 (2, 3), int64 (4,)'
    """
    parts = [f"{name_of(t.dtype)} {tuple(t.shape)}" for t in tensors_of(payload)]
    return ", ".join(parts) or "no tensor"
