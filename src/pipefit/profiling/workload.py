"""The measurable part of the training for which a plan is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from pipefit.errors import PlanError
from pipefit.parallel.loss import Loss
from pipefit.profiling.tensors import map_tensors
from pipefit.stage.precision import Half, in_float32
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer


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
    half: Half = None
    model: str = ""
    compiler: str | None = None

    def fresh(self) -> nn.Sequential:
        """A copy of the whole model."""
        return copy.deepcopy(nn.Sequential(*(layer.module for layer in self.layers)))

    @property
    def loss_of(self) -> Loss:
        """The loss; an output in the half type is first converted to float32, as in a run."""
        loss = self.loss
        half = self.half
        if half is None:
            return loss

        def converted(output: Any, target: Any) -> Any:
            return loss(map_tensors(lambda leaf: in_float32(leaf, half), output), target)

        # Variables that a user's loss reads are found by it.
        return update_wrapper(converted, loss, assigned=(), updated=())

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
