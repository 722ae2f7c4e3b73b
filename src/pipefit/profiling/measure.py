"""Measuring a model layer by layer, at one or several micro-batch sizes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from pipefit.errors import DataError, ProfileError
from pipefit.profiling.clock import Clock, half_interquartile_range, median_of, works_alone
from pipefit.profiling.optimizer import step_growth, step_seconds
from pipefit.profiling.passes import Marked, Step, Work
from pipefit.profiling.survey import Weighed, made_bytes, shared_weights, survey
from pipefit.profiling.tensors import batch_of, describe, graded, num_bytes, parameters_of, placed, take
from pipefit.profiling.untouched import untouched, with_threads
from pipefit.spec.profile import Layer, Profile
from pipefit.stage import accelerator
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.record_layout import name_of
from pipefit.stage.split import NamedLayer, joined, named_layers
from pipefit.stage.training import Loss, MakeOptimizer

_WARM_UP_S = 0.4
# Minimum number of repetitions for a useful median.
_FEWEST = 3


def profile_layers(
    layers: nn.Module | Sequence[Any],
    example_input: Any,
    loss: Loss | None = None,
    target: Any = None,
    *,
    microbatch_size: int | None = None,
    repeats: int = 15,
    warmup: int = 3,
    limit_s: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    threads: int | None = 1,
    optimizer: MakeOptimizer | None = None,
    clips: bool = False,
    model: str = "",
    halves: HalfCopies | None = None,
) -> Profile:
    """Measures forward, input gradient and weight gradient of every layer, and the whole step, alternating.

    Each repeat runs these passes through the whole model, so a slow moment of the machine affects all layers alike: one
    without marks (`step_s`), one with a mark at every layer (forward and full backward), one whose backward pass
    makes input gradients only, one whose backward comes layer by layer in two halves, and where there is attention a
    forward that marks its cores. The weight gradient is the full backward minus the input gradient; layers that nothing
    trainable precedes have no input gradient, frozen layers no weight gradient. All figures are medians. A CPU with one
    thread is timed by the processor time of that thread, so that other programs on the machine do not count. The layers
    run in train mode; weights, gradients, buffers, modes and random numbers are restored afterwards.

    Args:
        layers: an `nn.Sequential`, a list of modules or of (name, module); see `named_layers`.
        example_input: of the first layer: a tensor or a pytree of tensors, of at least `microbatch_size` samples along
            the first dimension.
        loss: (output, target) -> scalar; None: the backward pass starts from gradients of one, and `loss_s` is 0.
        target: for the loss, with as many samples as the input.
        microbatch_size: samples per micro-batch; None: as many as the example has.
        repeats: measured turns, at least 1.
        warmup: turns before them, after some passes for 0.4 s; 0: neither.
        limit_s: seconds after which no new turn begins, once three are measured; None: no limit.
        device: of the measurement; None: that of the weights.
        dtype: of floating weights and inputs meanwhile; None: unchanged.
        threads: torch's threads meanwhile, as many as a rank will have; None: unchanged.
        optimizer: parameters -> optimizer; its step on copies of the trainable weights gives `optimizer_s`.
        clips: whether a step also takes the norm of the gradients and scales them.
        model: name for the profile.
        halves: the half copies of weights with which the layers run.

    Returns:
        A profile in which the layers' seconds and `loss_s` add up to `step_s`, except for noise.

    Raises:
        ModelError: a layer cannot be called with its payload, or the loss is not a single number.
        DataError: the example has fewer samples than the micro-batch, or no batch dimension.
        ProfileError: `repeats` is below 1.
    """
    if repeats < 1 or warmup < 0:
        raise ProfileError(f"expected at least 1 repeat and 0 warm-up turns, got repeats={repeats}, warmup={warmup}")
    chain = named_layers(layers)
    batch = batch_of(example_input)
    if microbatch_size is None:
        size = batch
    else:
        size = microbatch_size
    if not 1 <= size <= batch:
        raise DataError(f"microbatch_size={size}: the example input has {batch} samples ({describe(example_input)})")
    place = _device_of(chain, device)
    with with_threads(threads), untouched(chain, place, dtype, loss):
        payload = placed(take(example_input, size, batch), place, dtype)
        goal = placed(take(target, size, batch), place, dtype)
        found = survey(chain, payload, halves, loss, goal)
        made = made_bytes(chain, payload)
        step = Step(chain, payload, loss, goal, Clock(place), any(one.layer.selective_bytes for one in found))
        work = step.work()
        idle = [num_bytes(filter(_is_idle, layer.module.parameters())) for layer in chain]
        alone = place.type == "cpu" and torch.get_num_threads() == 1 and works_alone(step.plain)
        step = replace(step, clock=Clock(place, own=alone))
        turns = _turns(step, repeats, warmup, limit_s)
        stepped = _Stepped(0.0, 0.0, 0.0, [0.0] * len(chain))
        if optimizer:
            stepped = _stepped(step, optimizer, repeats, clips)
        where = description(place, dtype)
    how = f"medians of {len(turns)} turns after {warmup}{', processor time' if alone else ''}"
    return Profile(
        model=model,
        microbatch_size=size,
        layers=tuple(_layers(found, turns, work, stepped, idle)),
        device=where,
        source=f"measured: {how}; torch {torch.__version__}",
        step_s=median_of([turn.plain for turn in turns]),
        loss_s=median_of([turn.marked.loss_s for turn in turns]) if loss else 0.0,
        optimizer_s=stepped.whole_s,
        loss_work_bytes=work.further.loss_s,
        step_work_bytes=stepped.whole_bytes,
        shared=shared_weights(layer.module.parameters() for layer in chain),
        made_bytes=made,
    )


class _Stepped(NamedTuple):
    """Measurements of the optimizer's step.

    Attributes:
        whole_s: seconds of a step on all weights.
        call_s: seconds that the step of each stage takes, even with few weights.
        whole_bytes: the most by which memory grows in a step on all weights.
        layers_bytes: the same of a step on the weights of each layer.
    """

    whole_s: float
    call_s: float
    whole_bytes: float
    layers_bytes: list[float]


def _stepped(step: Step, optimizer: MakeOptimizer, repeats: int, clips: bool) -> _Stepped:
    """Measures the optimizer's step between other work of training."""
    clock = step.clock
    weights = graded(parameters_of(step.chain))
    seconds = partial(step_seconds, optimizer=optimizer, clock=clock, repeats=repeats, clips=clips, before=step.plain)
    whole_s = seconds(weights)
    smallest = sorted(weights, key=torch.numel)[:1]
    call_s = min(seconds(smallest), whole_s)
    grown = partial(step_growth, optimizer=optimizer, clips=clips, device=clock.device)
    layers_bytes = [grown(layer.module.parameters()) for layer in step.chain]
    return _Stepped(whole_s, call_s, grown(weights), layers_bytes)


def profile_sizes(
    layers: nn.Module | Sequence[Any],
    example_input: Any,
    loss: Loss | None = None,
    target: Any = None,
    *,
    microbatch_sizes: Sequence[int],
    **options: Any,
) -> Profile:
    """Measures at several micro-batch sizes, the largest last.

    Args:
        layers: as in `profile_layers`.
        example_input: of at least the largest size.
        loss: as in `profile_layers`.
        target: as in `profile_layers`.
        microbatch_sizes: at least one.
        options: further ones of `profile_layers`.

    Returns:
        The profile at the first of `microbatch_sizes`, with the others in its `others`; `Profile.at` gives any size.

    Raises:
        ProfileError: no size is given, or one twice.
    """
    sizes = tuple(microbatch_sizes)
    if not sizes or len(set(sizes)) != len(sizes):
        raise ProfileError(f"microbatch_sizes: expected one or more different sizes, got {list(sizes)}")
    measured = {}
    for size in sorted(sizes):
        measured[size] = profile_layers(layers, example_input, loss, target, microbatch_size=size, **options)
    first = measured.pop(sizes[0])
    return first.with_others(measured.values())


class _Turn(NamedTuple):
    """One measurement by each of the passes of `Step` with these names."""

    plain: float
    marked: Marked
    inputs_only: Marked
    halved: list[tuple[float, float]] | None
    attended: list[float]


def _turns(step: Step, repeats: int, warmup: int, limit_s: float | None) -> list[_Turn]:
    """Runs the passes alternating; their order changes every time, so that none always follows the same one."""
    turns = []
    start = time.perf_counter()
    # A core that was idle is slow at first.
    while warmup and time.perf_counter() - start < _WARM_UP_S:
        step.plain()
    for turn in range(warmup + repeats):
        if limit_s is not None and turn >= warmup + _FEWEST and time.perf_counter() - start > limit_s:
            break
        first = turn % len(_Turn._fields)
        order = _Turn._fields[first:] + _Turn._fields[:first]
        turns.append(_Turn(**{name: getattr(step, name)() for name in order}))
    return turns[warmup:]


def _layers(
    found: Sequence[Weighed], turns: Sequence[_Turn], work: Work, stepped: _Stepped, idle: Sequence[int]
) -> Iterator[Layer]:
    """All figures of each layer."""
    stepped_bytes = sum(one.layer.wgrad_bytes for one in found)
    per_byte_s = (stepped.whole_s - stepped.call_s) / max(stepped_bytes, 1)
    for index, one in enumerate(found):
        layer = _layer(index, one, turns)
        yield msgspec.structs.replace(
            layer,
            step_s=layer.wgrad_bytes * per_byte_s,
            step_work_bytes=stepped.layers_bytes[index],
            idle_bytes=idle[index],
            **work.of_layer(index),
        )


def _layer(index: int, found: Weighed, turns: Sequence[_Turn]) -> Layer:
    forward = [turn.marked.forward_s[index] for turn in turns]
    backward = [turn.marked.backward_s[index] for turn in turns]
    full = median_of(backward)
    inputs = min(median_of([turn.inputs_only.backward_s[index] for turn in turns]), full)
    learns = found.layer.wgrad_bytes > 0
    if not learns:
        inputs = full
    elif not found.gets_gradients:
        inputs = 0.0
    halved = [turn.halved[index] for turn in turns if turn.halved is not None]
    split_s = 0.0 if halved else None
    split_input_s = 0.0
    if halved and learns and found.gets_gradients:
        first_s, second_s = (median_of(list(half)) for half in zip(*halved, strict=True))
        split_s = max(second_s - (full - inputs), 0.0)
        split_input_s = max(first_s - inputs, 0.0)
    return msgspec.structs.replace(
        found.layer,
        forward_s=median_of(forward),
        backward_input_s=inputs,
        backward_weight_s=full - inputs,
        split_s=split_s,
        split_input_s=split_input_s,
        attention_s=median_of([turn.attended[index] for turn in turns]) if found.layer.selective_bytes else 0.0,
        spread_s=half_interquartile_range([a + b for a, b in zip(forward, backward, strict=True)]),
    )


def _is_idle(parameter: Tensor) -> bool:
    """Returns whether a parameter trains and no backward has reached it."""
    return parameter.requires_grad and parameter.grad is None


def _device_of(chain: Sequence[NamedLayer], device: str | torch.device | None) -> torch.device:
    if device is None:
        roots = joined(chain)
        device = next((tensor.device for tensor in (*roots.parameters(), *roots.buffers())), "cpu")
    place = torch.device(device)
    if accelerator.is_accelerator(place) and place == torch.device(place.type):
        return torch.device(place.type, torch.accelerator.current_device_index())
    return place


def description(device: torch.device, dtype: torch.dtype | None) -> str:
    """The kind of a device, its name, the threads that compute, and the type, in words."""
    kind = ""
    if dtype:
        kind = f", {name_of(dtype)}"
    if accelerator.is_accelerator(device):
        return f"{device.type}: {accelerator.name_of(device)}{kind}"
    threads = torch.get_num_threads()
    return f"{device.type}: {_processor()}, {threads} thread{'s' if threads > 1 else ''}{kind}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
