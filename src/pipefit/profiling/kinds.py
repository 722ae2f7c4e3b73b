"""Seconds of a model that is too large to run: one layer of each kind is measured in isolation and then freed.

A device does not have one rate: a product of small matrices runs at half the rate of large ones, and the time of a
gradient's sum or an optimizer's step depends on the place of its memory. So the arithmetic of `analytic_profile` is
corrected by layers that are run, one for all identical ones.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipefit.errors import ModelError
from pipefit.profiling.analytic import LayerCost, analytic_profile, layer_costs
from pipefit.profiling.clock import Clock, median_of
from pipefit.profiling.optimizer import step_growth, step_seconds
from pipefit.profiling.passes import Step
from pipefit.profiling.survey import Storages, bytes_of, saved_storages, storage_key
from pipefit.profiling.tensors import (
    batch_of,
    call_layer,
    graded,
    in_graph,
    map_tensors,
    num_bytes,
    placed,
    take,
    tensors_of,
)
from pipefit.profiling.untouched import untouched
from pipefit.profiling.workload import Workload
from pipefit.runtime.malloc import in_use
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Device
from pipefit.stage.compiler import compiled_forwards
from pipefit.stage.device import random_state_kept
from pipefit.stage.materialise import is_meta, stand_in
from pipefit.stage.precision import Half
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import replaced_forwards

_FEWEST = 2
_MOST = 15
_LIMIT_S = 0.8
T = TypeVar("T")
_ROUNDED_TO_BYTES = 1024
"""The memory in use, without tensors, varies by less than this: other threads allocate too."""
_NUM_HELD = 10
_HELD_BYTES = 1 << 20
"""Number of forwards held at the same time, until malloc's cache of small pieces, which counts as in use, is empty;
for a layer that saves more than so many bytes this cache does not matter."""
_SMALL_BYTES = 64 << 20
"""Size of a layer that is run regardless of the memory limit."""


_AT_ONCE = 1.5
"""Memory of a step on all weights of a layer over that of its largest weight, from which it works on all at once."""


class _Trained(NamedTuple):
    """Measurements of a layer that was trained.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        step_s: seconds of a step on its weights; 0: it has none, or there was no memory.
        step_bytes: the most by which memory grew in this step.
        one_step_bytes: the same of a step on its largest weight.
    """

    forward_s: float
    backward_s: float
    step_s: float
    step_bytes: float
    one_step_bytes: float


class _Found(NamedTuple):
    """Measurements of one layer.

    Attributes:
        trained: those of its training; None: there was no memory for it.
        noted_bytes: memory that a forward leaves in use in addition to tensors: autograd's own data until the backward,
            and the allocator's rounding.
    """

    trained: _Trained | None
    noted_bytes: float


def profile_kinds(
    work: Workload,
    microbatch_size: int,
    device: Device,
    state_per_weight: float = 2.0,
    room_bytes: float = float("inf"),
) -> Profile:
    """A computed profile with measured seconds; the layers may be on the meta device.

    Layers with equal modules and equal forms of their tensors and their input are of one kind. One of each is run
    forward and backward, with its gradients added to existing ones, as in training; then the optimizer steps on its
    weights. A layer on the meta device is copied and initialised meanwhile. There is never more than one in memory.
    A kind that would not fit, and the loss, keep their computed seconds, scaled by the ratio of the measured kinds.

    Args:
        work: the model and its training, with an example of at least `microbatch_size` samples.
        microbatch_size: samples per micro-batch.
        device: with rates for the parts that are not measured.
        state_per_weight: bytes of the optimizer's states for each byte of weights, to determine which layers fit.
        room_bytes: memory limit of a measurement on the device.

    Returns:
        The profile with measured seconds, and with the memory in use in addition to tensors in `saved_bytes`. Layers
        are unchanged.
    """
    x, y = work.batch("measuring the layers")
    place = work.device
    computed = analytic_profile(
        work.layers,
        x,
        device,
        work.loss_of,
        y,
        microbatch_size=microbatch_size,
        model="the model",
        half=work.half,
        works=True,
    )
    costs = layer_costs(work.layers, x, Device(flops=1.0), microbatch_size)
    first = placed(take(x, microbatch_size, batch_of(x)), place, None)
    found: dict[int, _Found] = {}
    for layer, cost in zip(work.layers, costs, strict=True):
        # A small one is always measured, so that the smallest sufficient memory can be reported.
        if id(cost) in found or _needs_bytes(cost, trained=False) > max(room_bytes, _SMALL_BYTES):
            continue
        trains = _needs_bytes(cost) <= room_bytes
        # A layer that cannot run in isolation, on random data of the right form, keeps its computed seconds.
        with random_state_kept(place), suppress(ModelError, RuntimeError):
            if layer.index:
                payload = _payload(cost.input, place)
            else:
                payload = map_tensors(torch.clone, first)
            found[id(cost)] = _measured(layer, payload, work, trains, room_bytes, state_per_weight)
    return _corrected(computed, [found.get(id(cost)) for cost in costs])


def _measured(
    layer: NamedLayer, payload: Any, work: Workload, trains: bool, room_bytes: float, state_per_weight: float
) -> _Found:
    """Measures a layer in isolation: its forward, and its training where there is memory for it."""
    present = _present(layer, work.device)
    compiled = replaced_forwards(compiled_forwards([present], work.compiler))
    with untouched([present], work.device, None), compiled:
        run = _Forward(present, payload, work.device, work.half)
        run()
        noted_bytes = _noted_bytes(run)
        trained = None
        if trains:
            trained = _trained(run, work, room_bytes, state_per_weight)
    return _Found(trained, noted_bytes)


def _needs_bytes(cost: LayerCost, trained: bool = True) -> float:
    """Bytes of weights, gradients and new gradients where it is trained, and of its activations."""
    layer = cost.layer
    return layer.weight_bytes + 2 * layer.wgrad_bytes * trained + layer.saved_bytes + 2 * layer.output_bytes


def _payload(form: Any, device: torch.device) -> Any:
    def make(like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, device=device).to(like.dtype).requires_grad_(like.requires_grad)
        return torch.zeros_like(like, device=device)

    return map_tensors(make, form)


@dataclass(frozen=True)
class _Forward:
    """Runs one layer in isolation."""

    layer: NamedLayer
    payload: Any
    device: torch.device
    half: Half

    def __call__(self, payload: Any = None) -> Any:
        given = map_tensors(in_graph, self.payload if payload is None else payload)
        with torch.enable_grad(), torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            return call_layer(self.layer.name, self.layer.module, given)


def _present(layer: NamedLayer, device: torch.device) -> NamedLayer:
    """The layer; for one of the meta device a copy with weights."""
    if is_meta([layer]):
        layer = copy.deepcopy(layer)
        stand_in([layer], partial(_numbers_like, device=device))
    return layer


def _numbers_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Numbers in place of weights without memory, whose time does not depend on their values."""
    made = torch.ones_like(tensor, device=device)
    if tensor.is_floating_point() and tensor.dim() > 1:
        return made.normal_(std=0.02)
    return made


def _trained(run: _Forward, work: Workload, room_bytes: float, state_per_weight: float) -> _Trained:
    clock = Clock(run.device)
    weights = graded(run.layer.module.parameters())
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    layer = NamedLayer(0, run.layer.name, cast(torch.nn.Module, run))
    passes = _repeated(Step([layer], run.payload, None, None, clock).marked)
    for leaf in tensors_of(run.payload):
        leaf.grad = None
    forward_s = median_of([one.forward_s[0] for one in passes])
    backward_s = median_of([one.backward_s[0] for one in passes])
    step_s = step_bytes = one_step_bytes = 0.0
    by_size = sorted(weights, key=torch.numel)
    largest = num_bytes(by_size[-1:])
    if (2 + state_per_weight) * num_bytes(weights) + 3 * largest <= room_bytes:
        step_s = step_seconds(weights, work.optimizer, clock, len(passes))
        grown = partial(step_growth, optimizer=work.optimizer, clips=work.clips, device=run.device)
        step_bytes = grown(weights)
        one_step_bytes = grown(by_size[-1:])
    return _Trained(forward_s, backward_s, step_s, step_bytes, one_step_bytes)


def _noted_bytes(run: _Forward) -> float:
    tell = in_use(run.device)
    if tell is None:
        return 0.0
    layer = run.layer.module
    present = [*layer.parameters(), *layer.buffers(), *tensors_of(run.payload)]
    known = set(map(storage_key, present))
    seen: Storages = {}
    with saved_storages(seen, known):
        output = run()
    seen |= {storage_key(leaf): leaf.untyped_storage() for leaf in tensors_of(output)}
    tensors = bytes_of(seen[key] for key in seen.keys() - known)
    output = None
    seen.clear()
    held: list[Any] = []
    grown = []
    for _ in range(_NUM_HELD):
        if tensors > _HELD_BYTES:
            held.clear()
        before = tell()
        # Hooks use memory too, and a stage that keeps saved tensors while its weights are away has hooks.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            held.append(run())
        grown.append(tell() - before)
    noted = max(median_of(grown[-3:]) - tensors, 0.0)
    return math.ceil(noted / _ROUNDED_TO_BYTES) * _ROUNDED_TO_BYTES


def _repeated(measure: Callable[[], T]) -> list[T]:
    """The results of a few repetitions, fewer of slow ones, after a warm-up."""
    measure()
    began = time.perf_counter()
    results: list[T] = []
    while len(results) < _FEWEST or (len(results) < _MOST and time.perf_counter() - began < _LIMIT_S):
        results.append(measure())
    return results


def _corrected(profile: Profile, found: Sequence[_Found | None]) -> Profile:
    layers = []
    measured = []
    for layer, one in zip(profile.layers, found, strict=True):
        if one is not None:
            layer = replace(layer, saved_bytes=layer.saved_bytes + one.noted_bytes)
            if one.trained is not None:
                measured.append((layer, one.trained))
        layers.append(layer)
    if not measured:
        return replace(profile, layers=tuple(layers))
    stepped = [(layer, one) for layer, one in measured if one.step_s]
    time_ratio = _ratio([(layer.total_s, one.forward_s + one.backward_s) for layer, one in measured])
    step_s = _ratio([(layer.wgrad_bytes, one.step_s) for layer, one in stepped], none=0.0)
    step_bytes = _ratio([(layer.wgrad_bytes, one.step_bytes) for layer, one in stepped], none=0.0)
    rates = _Rates(time_ratio, step_s, step_bytes)
    layers = [rates.corrected(layer, one and one.trained) for layer, one in zip(layers, found, strict=True)]
    growths = [layer.step_work_bytes for layer in layers]
    growth = max(growths)
    if _ratio([(one.one_step_bytes, one.step_bytes) for _, one in stepped]) > _AT_ONCE:
        growth = sum(growths)
    return replace(
        profile,
        layers=tuple(layers),
        loss_s=profile.loss_s * rates.time,
        optimizer_s=sum(layer.step_s for layer in layers) or profile.optimizer_s,
        step_work_bytes=growth,
        source=f"{profile.source}; {len(measured)} of {len(layers)} layers by one of their kind, measured",
    )


class _Rates(NamedTuple):
    """Measured over computed figures, of all layers that were measured.

    Attributes:
        time: seconds of forward and backward.
        step: seconds of a step for each byte of a gradient.
        growth: bytes by which memory grows in a step for each byte of a gradient.
    """

    time: float
    step: float
    growth: float

    def corrected(self, layer: Layer, measured: _Trained | None) -> Layer:
        """The layer with measured figures, or with its computed ones at these rates."""
        if measured is None:
            measured = _Trained(layer.forward_s * self.time, layer.backward_s * self.time, 0.0, 0.0, 0.0)
        step_s = layer.wgrad_bytes * self.step
        step_bytes = layer.wgrad_bytes * self.growth
        if measured.step_s:
            step_s = measured.step_s
            step_bytes = measured.step_bytes
        inputs = 0.0
        if layer.backward_s:
            inputs = layer.backward_input_s / layer.backward_s
        return replace(
            layer,
            forward_s=measured.forward_s,
            backward_input_s=measured.backward_s * inputs,
            backward_weight_s=measured.backward_s * (1 - inputs),
            step_s=step_s,
            step_work_bytes=step_bytes,
        )


def _ratio(pairs: Sequence[tuple[float, float]], none: float = 1.0) -> float:
    """The second over the first, of their sums."""
    below = sum(a for a, _ in pairs)
    above = sum(b for _, b in pairs)
    if below:
        return above / below
    return none
