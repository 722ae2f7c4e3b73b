"""Settings of a model's training, and the parameters that its stages train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipefit.errors import ModelError
from pipefit.stage.precision import Half

Tensors = dict[str, Tensor]
"""Tensors by their names."""

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
Loss = Callable[[Any, Any], Any]
"""From a model's output and a target to a scalar, or to the pair of it and a dict of metrics by name."""
Metric = Callable[[Any, Any], float]
"""From a model's output and a target to a number."""


@dataclass(frozen=True)
class Training:
    """Settings of a model's training that do not depend on the schedule.

    Attributes:
        loss: from the model's output and the target to a scalar, the mean over the micro-batch; also with metrics, see
            `with_metrics`.
        optimizer: from a stage's parameters to their optimizer.
        scheduler: from an optimizer to its learning-rate schedule, stepped once per update.
        clip_norm: largest global norm of the gradients of an update; None: no clipping.
        seed: of all random numbers inside the model.
        half: the type that autocast computes in; None: no autocast.
        loss_scale: the first scale of the loss; None: the loss is not scaled.
        compiler: the backend of torch.compile that layers train by; None: they run as they are.
        nonfinite: what happens to an update that is not finite; see `Updates`.
    """

    loss: Loss
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    clip_norm: float | None = None
    seed: int = 0
    half: Half = None
    loss_scale: float | None = None
    compiler: str | None = None
    nonfinite: str = "stop"

    @property
    def needs_norm(self) -> bool:
        """Returns whether a step needs the norm of all gradients: to clip them, or to know whether they are finite."""
        return self.clip_norm is not None or self.loss_scale is not None


def with_metrics(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss and the metrics, numbers by name, that a loss function returned; most return no metrics."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    return returned, {}


def checked_loss(returned: Any) -> tuple[Tensor, Tensors]:
    """The loss and the metrics that a loss function returned, as tensors of one number.

    Raises:
        ModelError: one of them is not one number.
    """
    loss, metrics = with_metrics(returned)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a tensor of shape {list(loss.shape)}, {loss.dtype}"
        raise ModelError(f"the loss must be one number (the mean over a micro-batch), got {got}")
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    return loss, numbers


def _number(name: str, value: Any) -> Tensor:
    if isinstance(value, int | float | Tensor):
        found = torch.as_tensor(value, dtype=torch.float64)
        if found.numel() == 1:
            return found.detach().reshape(())
    got = f"{value!r:.60}"
    if isinstance(value, Tensor):
        got = f"a tensor of shape {list(value.shape)}"
    raise ModelError(f"the loss returned the metric {name!r}, which must be one number, got {got}")


class Tie(NamedTuple):
    """A parameter that several stages train.

    Attributes:
        owner: the first of its names; the copy of that name is saved.
        stage: the first of them, whose copy is counted in norms; others may hold it under the same name.
        shape: of the parameter.
        dtype: of the parameter.
    """

    owner: str
    stage: int
    shape: torch.Size
    dtype: torch.dtype


class Owned(NamedTuple):
    """A parameter that a stage trains, under the user's name."""

    name: str
    parameter: nn.Parameter
    tie: Tie | None

    @property
    def saved_name(self) -> str:
        """The name of its optimizer's states: that of the first copy, so that all copies are stepped alike."""
        if self.tie is not None:
            return self.tie.owner
        return self.name
