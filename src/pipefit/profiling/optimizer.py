"""Seconds of a step of the optimizer, and the memory that it takes and frees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from pipefit.parallel.weights import WeightStore
from pipefit.profiling.clock import Clock, median_of
from pipefit.profiling.live_bytes import Growth, LiveBytes
from pipefit.profiling.tensors import graded
from pipefit.stage.optimizing import optimizer_like
from pipefit.stage.training import MakeOptimizer

_WARMUP = 2


def step_seconds(
    weights: Sequence[nn.Parameter],
    optimizer: MakeOptimizer,
    clock: Clock,
    repeats: int,
    *,
    clips: bool = False,
    before: Callable[[], object] | None = None,
) -> float:
    """Measures steps as a stage makes them, on copies of the weights; their gradients are consumed.

    Args:
        weights: that the optimizer steps; a gradient that is missing counts as zeros.
        optimizer: parameters -> optimizer.
        clock: the clock of their device.
        repeats: measured steps.
        clips: whether a step takes the norm of the gradients and scales them.
        before: called before each step, with all other work of a training step, so that the processor's caches are as
            in training.

    Returns:
        The median seconds of a step: assigning gradients, clipping, the optimizer, freeing gradients.
    """
    if not weights:
        return 0.0
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in weights]
    copies = [nn.Parameter(p.detach().clone()) for p in weights]
    for parameter in weights:
        parameter.grad = None
    store = WeightStore(copies)
    stepper = optimizer_like(optimizer, weights)(store.masters)
    samples = []
    for turn in range(repeats + _WARMUP):
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad
        if before is not None:
            before()
        start = clock.mark()
        store.begin_step(0, in_place=True)
        if clips:
            nn.utils.clip_grad_norm_(store.masters, 1.0)
        stepper.step()
        store.end_step()
        end = clock.mark()
        store.rebase()
        clock.settle()
        # The first step makes the optimizer's states.
        if turn >= _WARMUP:
            samples.append(clock.between(start, end))
    return median_of(samples)


def step_growth(
    parameters: Iterable[nn.Parameter], optimizer: MakeOptimizer, clips: bool, device: torch.device
) -> float:
    """The most bytes by which memory grows in a step on copies of the parameters that train; see `step_seconds`."""
    weights = graded(parameters)
    with LiveBytes(device.type) as count:
        return step_seconds(weights, optimizer, Growth(count, device), 1, clips=clips)
