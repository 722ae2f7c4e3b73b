"""A profile from arithmetic: FLOP and bytes of every operation, for models and devices that are not available here.

Nothing is allocated: tensors are fake tensors of torch, and of identical layers (all blocks of a transformer) one is
evaluated. So a model of a trillion parameters takes seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.func import functional_call

from pipefit.cost.kernels import kernels_s, timed
from pipefit.cutting.states import attributes_kept
from pipefit.errors import ProfileError
from pipefit.profiling.computed_work import layer_work, loss_work
from pipefit.profiling.counting import KernelCount, pretended
from pipefit.profiling.passes import seed_bytes
from pipefit.profiling.survey import (
    Storages,
    begun_by,
    bytes_of,
    saved_storages,
    shared_weights,
    storage_key,
    travelling,
    weighed,
)
from pipefit.profiling.tensors import (
    Run,
    batch_of,
    call_layer,
    graded,
    in_graph,
    map_tensors,
    num_bytes,
    parameters_of,
    tensors_of,
)
from pipefit.spec.counted import Kernel, Kernels, LayerCount
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Device
from pipefit.stage.device import random_state_kept
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.payload import sent
from pipefit.stage.precision import Half
from pipefit.stage.replay import AttentionCores, replayed, replayed_module
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.stage import in_mode, replaced_forwards
from pipefit.stage.training import Loss, checked_loss

# Adam on float32 reads weight, gradient and two states, and writes all but the gradient: seven passes of 4 bytes.
_ADAM_BYTES = 28


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one micro-batch, with its input and output as payloads on the meta device."""

    layer: Layer
    input: Any
    output: Any
    count: LayerCount


def analytic_profile(
    layers: nn.Module | Sequence[Any],
    example_input: Any,
    device: Device,
    loss: Loss | None = None,
    target: Any = None,
    *,
    microbatch_size: int | None = None,
    dtype: torch.dtype | None = None,
    model: str = "",
    half: Half = None,
    works: bool = False,
) -> Profile:
    """Computes a profile from FLOP and bytes, as `profile_layers` would measure it on such a device.

    Attention is counted as the fused kernels run it (no matrix of scores is kept). A storage that two layers save
    counts for both: identical layers are evaluated once, without their neighbours.

    Args:
        layers: as in `profile_layers`, on any device (the meta device for what does not fit).
        example_input: payload of the first layer, on any device; only shapes and types matter.
        device: its rate of products, `efficiency` and `memory_bandwidth_bytes_per_s` (0: only products count).
        loss: (output, target) -> scalar; None: `loss_s` is 0.
        target: for the loss; only shapes and types matter.
        microbatch_size: samples per micro-batch; None: as many as the example has. It may be larger than the example's.
        dtype: of floating weights and inputs; None: as they are.
        model: name for the profile.
        half: the type that autocast computes in; None: no autocast.
        works: whether the memory that layers and loss take while they work is counted too.

    Raises:
        ProfileError: the device's `flops` are not known.
        ModelError: a layer cannot be called with its payload.
    """
    if device.flops <= 0:
        raise ProfileError('device.flops: computed profiles need it; give it in the topology: flops = "312 TFLOP/s"')
    chain = named_layers(layers)
    element_bytes = _element_bytes(chain, half or dtype)
    device = device.for_elements(element_bytes)
    batch = batch_of(example_input)
    if microbatch_size is None:
        size = batch
    else:
        size = microbatch_size
    costs = layer_costs(chain, example_input, device, size, dtype, half, works)
    loss_s = loss_work_bytes = 0.0
    seeds = None
    if loss:
        output = costs[-1].output
        goal = _form(target, dtype, batch, size)
        with random_state_kept(), attributes_kept((), loss), pretended(), torch.enable_grad():
            loss_s = _loss_s(loss, output, goal, device)
            seeds = seed_bytes(loss, like(output), like(goal))
            if works:
                loss_work_bytes = loss_work(loss, like(output), like(goal))
    bandwidth = device.memory_bandwidth_bytes_per_s
    optimizer_s = 0.0
    if bandwidth:
        trained = sum(map(torch.numel, graded(parameters_of(chain))))
        optimizer_s = _ADAM_BYTES * trained / bandwidth
    *placed, last = (_placed(layer, cost, len(chain), half) for layer, cost in zip(chain, costs, strict=True))
    return Profile(
        model=model,
        microbatch_size=size,
        layers=(*placed, begun_by(last, seeds)),
        device=f"computed: {device.flops:.4g} FLOP/s at {device.efficiency:.0%}, {bandwidth:.4g} bytes/s",
        source=f"computed from FLOP and bytes of each operation; torch {torch.__version__}",
        loss_s=loss_s,
        optimizer_s=optimizer_s,
        loss_work_bytes=loss_work_bytes,
        element_bytes=element_bytes,
        shared=shared_weights(layer.module.parameters() for layer in chain),
    )


def _element_bytes(chain: Sequence[NamedLayer], wanted: torch.dtype | None) -> int:
    """Bytes of the numbers in products: of a type, or of the largest weight; 0: there is none."""
    if wanted is None:
        weights = parameters_of(chain)
        if not weights:
            return 0
        wanted = max(weights, key=torch.numel).dtype
    return wanted.to_real().itemsize


def _placed(layer: NamedLayer, cost: LayerCost, num_layers: int, half: Half) -> Layer:
    """The figures of a layer at its place in a model."""
    input_bytes = None
    if replayed_module(layer, num_layers) is not None:
        input_bytes = num_bytes(tensors_of(sent(cost.input)))
    found = replace(cost.layer, name=layer.name, input_bytes=input_bytes)
    if half is not None and layer.index < num_layers - 1:
        found = travelling(found, cost.output, half)
    return found


def layer_costs(
    chain: Sequence[NamedLayer],
    example_input: Any,
    device: Device,
    microbatch_size: int,
    dtype: torch.dtype | None = None,
    half: Half = None,
    works: bool = False,
) -> list[LayerCost]:
    """The cost of each layer; identical layers with inputs of one form share one object."""
    form = _form(example_input, dtype, batch_of(example_input), microbatch_size)
    known = {}
    costs = []
    with random_state_kept(), attributes_kept(layer.module for layer in chain):
        for layer in chain:
            key = (configuration_of(layer.module), repr(form))
            if key not in known:
                known[key] = _cost(layer.name, layer.module, form, device, dtype, half, works)
            costs.append(known[key])
            form = costs[-1].output
    return costs


def _form(payload: Any, dtype: torch.dtype | None, batch: int, size: int) -> Any:
    """A payload without its content, with `size` samples in place of `batch`."""

    def form(tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        if shape[:1] == (batch,):
            shape = (size, *shape[1:])
        return torch.empty(shape, dtype=_dtype_of(tensor, dtype), device="meta")

    return map_tensors(form, payload)


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype and tensor.is_floating_point():
        return dtype
    return tensor.dtype


def like(form: Any, device: str = "cpu") -> Any:
    """Tensors of a form, leaves of the graph; fake ones within `pretended()`."""
    return map_tensors(
        lambda t: torch.empty(t.shape, dtype=t.dtype, device=device, requires_grad=t.requires_grad), form
    )


def forms_of(payload: Any) -> Any:
    """The form of a payload, on the meta device."""
    return like(payload, "meta")


def configuration_of(layer: nn.Module) -> tuple[Any, ...]:
    """The key of a layer's cost: its modules with their plain attributes, and the forms of its tensors."""
    modules = []
    for name, module in layer.named_modules():
        plain = {}
        for key, value in vars(module).items():
            is_state = key.startswith("_") and not isinstance(value, int | float | str)
            if not is_state and not key.endswith(_NUMBERS):
                plain[key] = _text(value)
        settings = tuple(sorted(plain.items()))
        modules.append((name, type(module), module.extra_repr(), settings))
    tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in _named_tensors(layer)]
    return tuple(modules), tuple(tensors)


def _text(value: Any) -> str:
    """An attribute as text; an object whose text does not say its value is equal only to itself."""
    if isinstance(value, _PLAIN):
        text = _PATH_NUMBER.sub(".*.", repr(value))
        if " at 0x" not in text:
            return text
    return str(id(value))


def _named_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under all their names."""
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


_NUMBERS = ("layer_idx", "layer_id", "layer_index")
"""Ends of names of attributes in which a layer has only its number."""

_PATH_NUMBER = re.compile(r"\.\d+\.")
"""The number of a layer in the path of a module."""

_PLAIN = (int, float, str, bool, tuple, list, dict, type(None), torch.dtype, torch.device, partial, BuiltinFunctionType)


def _cost(
    name: str,
    layer: nn.Module,
    form: Any,
    device: Device,
    dtype: torch.dtype | None,
    half: Half,
    works: bool,
) -> LayerCost:
    """Evaluates one layer on fake tensors."""
    counter = KernelCount([])
    halves = HalfCopies()
    if half is not None:
        halves.take([layer], half, "cpu")
    computing = torch.autocast("cpu", half, enabled=half is not None)
    with in_mode(True, layer), pretended(), torch.enable_grad(), computing, replaced_forwards(halves.forwards):
        state = pretended_state(layer, dtype)

        def run(x: Any) -> Any:
            return call_layer(name, lambda x: functional_call(layer, state, (x,)), x)

        weights = [state[key] for key, _ in layer.named_parameters()]
        if half is not None:
            run(like(form))
        copies = halves.of_each(weights)
        persistent = {storage_key(tensor) for tensor in (*state.values(), *copies)}
        count, output = count_layer(counter, run, form, weights, persistent)
        found = replace(timed(name, count, device), copy_bytes=num_bytes(copies))
        if works:
            found = replace(found, **layer_work(run, like(form), weights))
    return LayerCost(found, form, forms_of(output), count)


def count_layer(
    counter: KernelCount, run: Run, given: Any, weights: Sequence[Tensor], persistent: set[int]
) -> tuple[LayerCount, Any]:
    """The count of one layer, and its output: forward, gradients of the input, and of all.

    Args:
        counter: of kernels; it is entered here.
        run: the forward, on fake tensors.
        given: the form of its input.
        weights: parameters of the layer, as fake tensors, tied ones once.
        persistent: storages that a forward does not save: weights and buffers.
    """
    leaves = like(given)
    payload = map_tensors(in_graph, leaves)
    inputs = graded(tensors_of(leaves))
    seen: Storages = {}
    cores: list[Kernel] = []

    def noted(core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = len(counter.kernels)
        result = core(*args, **kwargs)
        cores.extend(counter.kernels[begin:])
        return result

    counter.take()
    with counter, saved_storages(seen, persistent), AttentionCores(noted):
        output = run(payload)
    forward = counter.take()
    ways = gradients_of(counter, tensors_of(output), inputs, weights)
    selective_bytes = None
    if cores:
        chosen: Storages = {}
        with counter, saved_storages(chosen, persistent), AttentionCores(partial(replayed, preserve_rng_state=False)):
            run(payload)
        selective_bytes = bytes_of(chosen.values())
    bare = weighed("", inputs, output, seen.values(), weights)
    bare = replace(bare, selective_bytes=selective_bytes)
    counter.take()
    return LayerCount(figures_of(bare), forward, *ways, cores=tuple(cores)), output


def gradients_of(
    counter: KernelCount, outputs: Iterable[Tensor], inputs: list[Tensor], weights: Sequence[Tensor]
) -> tuple[Kernels, Kernels]:
    """The kernels of the gradients of inputs, and those that the gradients of weights need in addition.

    These are added to the gradients of the micro-batches before: two are read, and their sum is written.
    """
    roots = graded(outputs)
    trained = graded(weights)
    of_inputs = _backward(counter, roots, inputs)
    every = _backward(counter, roots, inputs + trained)
    known = Counter(of_inputs)
    more = []
    # In the order in which they run, which is that of other micro-batch sizes.
    for kernel in every:
        known[kernel] -= 1
        if known[kernel] < 0:
            more.append(kernel)
    if every:
        more += [Kernel("pass", (0.0, 3.0 * num_bytes([weight]))) for weight in trained]
    return of_inputs, tuple(more)


def _backward(counter: KernelCount, roots: list[Tensor], inputs: list[Tensor]) -> Kernels:
    if not roots or not inputs:
        return ()
    seeds = [torch.empty_like(root) for root in roots]
    with counter:
        torch.autograd.grad(roots, inputs, seeds, retain_graph=True, allow_unused=True)
    return counter.take()


def figures_of(layer: Layer) -> dict[str, float]:
    """The bytes of a layer by their fields, those that are known."""
    names = [name for name in Layer.__struct_fields__ if name.endswith("_bytes")]
    return {name: getattr(layer, name) for name in names if getattr(layer, name) is not None}


def pretended_state(layer: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Parameters and buffers by name, as fake tensors; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    state = {}
    for name, tensor in _named_tensors(layer):
        if id(tensor) not in made:
            kind = _dtype_of(tensor, dtype)
            made[id(tensor)] = torch.empty(tensor.shape, dtype=kind, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(made[id(tensor)].detach(), tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


def _loss_s(loss: Loss, output: Any, target: Any, device: Device) -> float:
    """Seconds of a loss and its gradient, by fake tensors."""
    counter = KernelCount([])
    payload = like(output)
    with counter:
        returned = loss(payload, like(target))
    value, _ = checked_loss(returned)
    forward = counter.take()
    inputs = graded(tensors_of(payload))
    return kernels_s(device, forward + _backward(counter, [value], inputs))
