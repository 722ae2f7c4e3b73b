"""What a step of the optimizer takes: of the whole model, and what each layer adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipefit.profiling.clock import Clock, median_of
from pipefit.profiling.layers import Chain
from pipefit.stage.weights import WeightStore

__all__ = ["Optimizer", "StepSeconds", "step_seconds"]

Optimizer = Callable[[list[Any]], torch.optim.Optimizer]
_WARMUP, _FEW = 2, 5


class StepSeconds(NamedTuple):
    """Seconds of a step.

    Attributes:
        whole_s: of all weights together.
        layers_s: what each layer adds; with what every step costs, they add up to `whole_s`.
    """

    whole_s: float
    layers_s: tuple[float, ...]

    def of_layer(self, index: int) -> float:
        """Of a layer; 0 where none was measured."""
        return self.layers_s[index] if self.layers_s else 0.0


def step_seconds(
    chain: Chain,
    optimizer: Optimizer,
    clock: Clock,
    repeats: int,
    clips: bool = False,
    before: Callable[[], object] = int,
) -> StepSeconds:
    """Measures steps as a stage makes them, on copies of the weights, which would otherwise change.

    Before each step of the whole, `before` does what else a training does, so that the step finds the processor's
    caches as it will find them. How the layers share in it is measured without. A weight that several layers share is
    stepped with the first of them.
    """
    seen: set[int] = set()
    owned: list[list[nn.Parameter]] = []
    for _, layer in chain:
        mine = [p for p in layer.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, mine))
        owned.append(mine)
    whole_s = _step_s([p for mine in owned for p in mine], optimizer, clock, repeats, clips, before)
    few = min(repeats, _FEW)
    least = [nn.Parameter(torch.zeros(1))]
    base_s, warm_s = (_step_s(least, optimizer, clock, few, clips, first) for first in (before, int))
    above = [max(_step_s(mine, optimizer, clock, few, clips) - warm_s, 0.0) for mine in owned]
    scale = max(whole_s - base_s, 0.0) / sum(above) if sum(above) else 0.0
    return StepSeconds(whole_s, tuple(seconds * scale for seconds in above))


def _step_s(
    weights: Sequence[nn.Parameter],
    optimizer: Optimizer,
    clock: Clock,
    repeats: int,
    clips: bool,
    before: Callable[[], object] = int,
) -> float:
    """Seconds of one step: taking the gradients over, clipping, the optimizer, letting go."""
    if not weights:
        return 0.0
    copies = [nn.Parameter(p.detach().clone()) for p in weights]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in weights]
    store = WeightStore(copies)
    stepper = optimizer(store.masters)
    samples = []
    for turn in range(repeats + _WARMUP):
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad
        before()
        start = clock.mark()
        store.begin_step(0, in_place=True)
        if clips:
            _clip(grads)
        stepper.step()
        store.end_step()
        end = clock.mark()
        store.rebase()
        clock.settle()
        # The first step makes the optimizer's states.
        samples += [clock.between(start, end)] if turn >= _WARMUP else []
    return median_of(samples)


def _clip(grads: list[Tensor]) -> None:
    norm = torch.stack([one.double() for one in torch._foreach_norm(grads)]).square().sum().sqrt()
    torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))
