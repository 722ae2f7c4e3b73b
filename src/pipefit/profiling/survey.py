"""One forward pass that weighs: bytes of outputs and gradients, and what autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipefit.errors import ModelError
from pipefit.profiling.layers import Chain, call_layer
from pipefit.profiling.tensors import describe, num_bytes, tensors_of
from pipefit.runtime.halves import Saved, input_half

__all__ = ["Weights", "half_bytes_of", "saved_storages", "storage_key", "survey", "weight_bytes_of"]


@dataclass(frozen=True)
class Weights:
    """Bytes of one layer; the names are those of `pipefit.spec.Layer`.

    `grad_bytes` is None where the whole output needs a gradient; `gets_gradients`: something trainable precedes the
    layer, so its input has a gradient; `learns`: it has a trainable parameter.
    """

    output_bytes: int
    grad_bytes: int | None
    saved_bytes: int
    weight_bytes: int
    half_bytes: int | None
    gets_gradients: bool
    learns: bool


def survey(chain: Chain, payload: Any) -> tuple[list[Weights], Any]:
    """Runs the layers once and weighs each one.

    A storage that two layers save (the output of a ReLU is the input of the linear layer after it) counts once, for
    the first of them: the sum over the layers of a stage is what it keeps, but for the input that reached it.

    Returns:
        One `Weights` per layer, and the output of the last one.

    Raises:
        ModelError: a layer raises; it is named with the shapes it was given.
    """
    persistent = {storage_key(tensor) for _, layer in chain for tensor in (*layer.parameters(), *layer.buffers())}
    seen: dict[int, Any] = {}
    found = []
    for name, layer in chain:
        before = len(seen)
        inputs = [leaf for leaf in tensors_of(payload) if leaf.requires_grad]
        with saved_storages(seen, persistent):
            payload = call_layer(name, layer, payload, describe(payload))
        saved = sum(storage.nbytes() for storage in list(seen.values())[before:])
        leaves = tensors_of(payload)
        grad_bytes = num_bytes([leaf for leaf in leaves if leaf.requires_grad])
        output_bytes = num_bytes(leaves)
        half_bytes = half_bytes_of(inputs, [leaf for leaf in leaves if leaf.requires_grad])
        learns = any(parameter.requires_grad for parameter in layer.parameters())
        partly = None if grad_bytes == output_bytes else grad_bytes
        sizes = output_bytes, partly, saved, weight_bytes_of(layer), half_bytes
        found.append(Weights(*sizes, bool(inputs), learns))
    return found, payload


def weight_bytes_of(layer: nn.Module) -> int:
    """Bytes of the parameters of a layer, frozen ones too; one that is tied inside the layer counts once."""
    return num_bytes(list(layer.parameters()))


def half_bytes_of(inputs: list[Tensor], outputs: list[Tensor]) -> int | None:
    """Bytes that a backward in two halves keeps from the first to the second; None: it cannot be halved.

    The first half runs for it, on gradients of one; the graph is left as it is.
    """
    given = Saved(inputs, [get_gradient_edge(output) for output in outputs])
    try:
        _, runs = input_half(given, [torch.ones_like(output) for output in outputs])
    except (ModelError, RuntimeError):
        return None
    kept = {storage_key(grad): grad.untyped_storage() for run in runs for grad in run.grads}
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def saved_storages(seen: dict[int, Any], persistent: set[int]) -> Iterator[None]:
    """Collects the storages that autograd saves, but for the persistent ones (weights and buffers), each once."""

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in persistent and key not in seen:
            # Holding the storage keeps its address from being used again within the pass.
            seen[key] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors that share memory, while one of them lives."""
    return tensor.untyped_storage()._cdata
