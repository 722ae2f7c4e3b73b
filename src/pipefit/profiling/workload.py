"""The measurable part of the training for which a plan is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipefit.errors import PlanError
from pipefit.parallel.loss import Loss
from pipefit.profiling.tensors import map_tensors
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer


class _HalfLoss(nn.Module):
    """The loss of an output in the half type: a module, as the variables of its attributes are kept in measurements."""

    def __init__(self, loss: Loss, half: torch.dtype) -> None:
        super().__init__()
        self.loss = loss
        self.dtype = half

    def forward(self, output: Any, target: Any) -> Any:
        """The loss of the output in float32."""
        return self.loss(map_tensors(lambda leaf: leaf.float() if leaf.dtype == self.dtype else leaf, output), target)


@dataclass(frozen=True)
class Workload:
    """A model and its training, before it is split into stages.

    Attributes:
        layers: the layers of the whole model; under a memory cap they may be on the meta device.
        loss: gives the mean loss from the model's output and the target.
        optimizer: makes the optimizer of a stage's parameters.
        device: the device of a rank.
        example: (input, target) of one batch; None: nothing can be measured.
        clips: gradients are clipped by their global norm.
        half: the type that autocast computes in; None: no autocast.
        model: its name.
        compiler: the backend of torch.compile that layers train by; None: they run as they are.
    """

    layers: Sequence[NamedLayer]
    loss: Loss
    optimizer: MakeOptimizer
    device: torch.device
    example: tuple[Any, Any] | None = None
    clips: bool = False
    half: torch.dtype | None = None
    model: str = ""
    compiler: str | None = None

    def fresh(self) -> nn.Sequential:
        """A copy of the whole model."""
        return copy.deepcopy(nn.Sequential(*(layer.module for layer in self.layers)))

    @property
    def loss_of(self) -> Loss:
        """The loss; an output in the half type is first converted to float32, as in a run."""
        if self.half is None:
            return self.loss
        return _HalfLoss(self.loss, self.half)

    def batch(self, why: str) -> tuple[Any, Any]:
        """The example.

        Args:
            why: the use of it, for the message.

        Raises:
            PlanError: there is no example.
        """
        if self.example is None:
            raise PlanError(f"{why} needs example=(input, target), one batch of data")
        return self.example
