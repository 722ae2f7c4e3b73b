"""One forward pass that counts bytes: of outputs and gradients, and of tensors that autograd saves for the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipefit.errors import ModelError
from pipefit.profiling.passes import seed_bytes
from pipefit.profiling.tensors import call_layer, graded, num_bytes, tensors_of
from pipefit.runtime.halves import Saved, input_half
from pipefit.spec.counted import SharedWeights
from pipefit.spec.profile import Layer
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.payload import sent
from pipefit.stage.precision import narrowed
from pipefit.stage.replay import AttentionCores, replayed_module
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.training import Loss

Storages = dict[int, Any]
"""Storages by their keys."""


class Weighed(NamedTuple):
    """A layer with its bytes, without seconds.

    Attributes:
        layer: named.
        gets_gradients: whether a trainable layer precedes it, so that its input has a gradient.
    """

    layer: Layer
    gets_gradients: bool


def survey(
    chain: Sequence[NamedLayer],
    payload: Any,
    halves: HalfCopies | None = None,
    loss: Loss | None = None,
    target: Any = None,
) -> list[Weighed]:
    """Runs the layers once and counts the bytes of each one.

    A storage that two layers save (the output of a ReLU is the input of the linear layer after it) counts once, for
    the first of them: the sum over the layers of a stage is the bytes it keeps, without its input. Half copies of
    weights, which all micro-batches share, are counted on their own. The last layer's backward begins with the
    gradients that the loss gives, if there is one.

    Raises:
        ModelError: a layer raises; the message names it and the shapes of its input.
    """
    roots = joined(chain)
    halves = halves or HalfCopies()
    persistent = {storage_key(tensor) for tensor in (*roots.parameters(), *roots.buffers())}
    seen: Storages = {}
    found = []
    for layer in chain:
        weights = list(layer.module.parameters())
        before = dict(seen)
        cores = 0
        inputs = graded(tensors_of(payload))
        crossing = tensors_of(sent(payload))

        def counted(core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal cores
            cores += 1
            return core(*args, **kwargs)

        given = payload
        with saved_storages(seen, persistent), AttentionCores(counted):
            payload = call_layer(layer.name, layer.module, given)
        copies = halves.of_each(weights)
        persistent.update(map(storage_key, copies))
        saved = [storage for key, storage in seen.items() if key not in before and key not in persistent]
        made = weighed(layer.name, inputs, payload, saved, weights)
        if halves.half is not None and layer is not chain[-1]:
            made = travelling(made, payload, halves.half)
        made = replace(made, copy_bytes=num_bytes(copies))
        if replayed_module(layer, len(chain)) is not None:
            present = list(map(storage_key, crossing))
            again = [storage for storage in saved if storage._cdata not in present]
            made = replace(made, input_bytes=num_bytes(crossing), again_bytes=bytes_of(again))
        if cores:
            chosen = dict(before)
            with saved_storages(chosen, persistent), AttentionCores():
                call_layer(layer.name, layer.module, given)
            kept = [storage for key, storage in chosen.items() if key not in before]
            made = replace(made, selective_bytes=bytes_of(kept))
        if loss and layer is chain[-1]:
            made = begun_by(made, seed_bytes(loss, payload, target))
        found.append(Weighed(made, bool(inputs)))
    return found


def made_bytes(chain: Sequence[NamedLayer], batch: Any) -> int:
    """Bytes of the masks and tables that every stage of a cut model makes for its blocks; 0: of another model."""
    shell: Any = getattr(chain[0].module, "shell", None)
    if not hasattr(shell, "pass_by"):
        return 0
    found: Storages = {}
    blocks = count(1)

    def note(arguments: list[Any]) -> None:
        crossing = shell.crossing[next(blocks)]
        made = [leaf for place, leaf in enumerate(arguments) if place not in crossing]
        for tensor in tensors_of(made):
            found[storage_key(tensor)] = tensor.untyped_storage()

    shell.pass_by(batch, note)
    for present in (*shell.model.parameters(), *shell.model.buffers(), *tensors_of(batch)):
        found.pop(storage_key(present), None)
    return bytes_of(found.values())


def weighed(name: str, inputs: list[Tensor], output: Any, saved: Iterable[Any], weights: Sequence[Tensor]) -> Layer:
    """The bytes of a layer that has run, its seconds left at 0.

    Args:
        name: of the layer.
        inputs: tensors of its input that need a gradient.
        output: of its forward.
        saved: storages that autograd keeps.
        weights: parameters, frozen ones too, which do not need a gradient; one that is tied inside the layer once.
    """
    leaves = tensors_of(sent(output))
    learned = graded(leaves)
    output_bytes = num_bytes(leaves)
    grad_bytes = num_bytes(learned)
    return Layer(
        name,
        forward_s=0.0,
        backward_input_s=0.0,
        backward_weight_s=0.0,
        output_bytes=output_bytes,
        saved_bytes=bytes_of(saved),
        weight_bytes=num_bytes(weights),
        grad_bytes=None if grad_bytes == output_bytes else grad_bytes,
        half_bytes=_half_bytes(inputs, learned),
        trained_bytes=num_bytes(graded(weights)),
    )


def travelling(layer: Layer, output: Any, half: torch.dtype) -> Layer:
    """The layer whose output travels in a half type where it carries a gradient."""
    leaves = tensors_of(sent(output))
    narrow = narrowed(leaves, [leaf.requires_grad for leaf in leaves], half)
    size = num_bytes(narrow)
    if size == layer.output_bytes:
        return layer
    return replace(layer, output_bytes=size, grad_bytes=num_bytes(graded(narrow)), inner_bytes=layer.output_bytes)


def begun_by(layer: Layer, seed_bytes: float | None) -> Layer:
    """The last layer, whose backward begins with gradients of so many bytes; None: of its whole output."""
    if seed_bytes is None or seed_bytes == layer.output_bytes:
        return layer
    return replace(layer, grad_bytes=seed_bytes)


def shared_weights(layers: Iterable[Iterable[Tensor]]) -> tuple[SharedWeights, ...]:
    """The weights that several layers of a model share, by the weights of each layer."""
    latest: dict[int, int] = {}
    weights: Counter[tuple[int, int]] = Counter()
    trained: Counter[tuple[int, int]] = Counter()
    for index, own in enumerate(layers):
        for parameter in own:
            pair = latest.get(id(parameter), index), index
            latest[id(parameter)] = index
            if pair[0] < index:
                weights[pair] += parameter.nbytes
                trained[pair] += parameter.nbytes * parameter.requires_grad
    return tuple(SharedWeights(pair, weights[pair], trained[pair]) for pair in sorted(weights))


def bytes_of(storages: Iterable[Any]) -> int:
    """Bytes of some storages."""
    return sum(storage.nbytes() for storage in storages)


def _half_bytes(inputs: list[Tensor], outputs: list[Tensor]) -> int | None:
    """Bytes that a backward in two halves keeps from the first to the second; None: it cannot be halved.

    The first half runs for it, on gradients of one; the graph is left as it is.
    """
    given = Saved(inputs, [get_gradient_edge(output) for output in outputs])
    try:
        _, runs = input_half(given, [torch.ones_like(output) for output in outputs])
    except (ModelError, RuntimeError):
        return None
    kept = {storage_key(grad): grad.untyped_storage() for run in runs for grad in run.grads}
    return bytes_of(kept.values())


@contextmanager
def saved_storages(seen: Storages, persistent: set[int]) -> Iterator[None]:
    """Collects the storages that autograd saves, except the persistent ones (weights and buffers), each once."""

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in persistent and key not in seen:
            # Holding the storage keeps its address from being used again within the pass.
            seen[key] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's memory: one for all tensors that share it, while one of them exists."""
    return tensor.untyped_storage()._cdata
