"""The memory that layers and the loss take and free while they work, counted on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipefit.profiling.clock import Clock
from pipefit.profiling.passes import Step
from pipefit.profiling.tensors import Run, map_tensors
from pipefit.stage.accelerator import CPU
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Loss


class _Layer(nn.Module):
    """A function of a payload and of some weights."""

    def __init__(self, run: Run, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._run = run
        for index, weight in enumerate(weights):
            assert isinstance(weight, nn.Parameter)
            self.register_parameter(str(index), weight)

    def forward(self, payload: Any) -> Any:
        return self._run(payload)


def layer_work(run: Run, payload: Any, weights: Sequence[Tensor]) -> dict[str, float]:
    """The figures of `Work` of one layer, between two others.

    Args:
        run: the forward, on fake tensors.
        payload: its input.
        weights: its parameters.
    """
    return _between(_Layer(run, weights), payload, None, None).work().of_layer(1)


def loss_work(loss: Loss, output: Any, target: Any) -> float:
    """The most by which memory grows in the loss of an output and its gradient."""
    return _between(_Layer(_passed_on), output, loss, target).work().further.loss_s


def _between(layer: _Layer, payload: Any, loss: Loss | None, target: Any) -> Step:
    modules = [_Layer(_passed_on), layer, _Layer(_passed_on)]
    chain = [NamedLayer(index, str(index), module) for index, module in enumerate(modules)]
    return Step(chain, payload, loss, target, Clock(CPU))


def _passed_on(payload: Any) -> Any:
    """The numbers of a payload in new memory, as are those of its gradient."""
    return map_tensors(lambda leaf: leaf * 1 if leaf.requires_grad else leaf, payload)
