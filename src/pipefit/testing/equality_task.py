"""What is trained twice, once by a pipeline and once by the reference, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipefit.stage.precision import first_scale, half_of

__all__ = ["Outcome", "Task", "descend", "mean_cross_entropy"]


def descend(parameters: list[nn.Parameter]) -> Optimizer:
    """SGD with momentum, the optimizer of a check: unlike Adam it hides no wrongly scaled gradient."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats: logits (…, classes) and classes (…) int64 -> a scalar."""
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


mean_cross_entropy.is_mean_cross_entropy = True


@dataclass(frozen=True)
class Task:
    """A model, its data and how both sides train it. Neither side changes any of it: each works on a deep copy.

    Attributes:
        model: an `nn.Sequential` or a list of layers.
        batches: (input, target) of each step, all of one program.
        num_ranks: of the pipeline, replicas included; each of them is `tensor` processes.
        schedule: its name.
        num_microbatches: per step.
        counts: layers of each stage.
        num_chunks: stages per rank.
        replicas: copies of each stage (empty: one each; a single number: of every stage).
        recompute: whether the pipeline replays its forwards.
        loss: from output and target to their mean.
        optimizer: from parameters to an optimizer.
        scheduler: from an optimizer to its learning-rate schedule.
        clip_norm: largest global norm of an update's gradients.
        weigh: how much a micro-batch counts in its batch's mean, from its target; None: its samples.
        seed: of the random numbers inside the model.
        device: where both sides compute.
        options: integers particular to the schedule.
        tensor: processes that share each rank by tensor parallelism.
        sequence_parallel: they also divide the sequence.
        scatter_gather: messages between ranks travel in pieces.
        precision: "fp32": the model's own type; "bf16" or "fp16": both sides compute in it under autocast.
        loss_scale: the first scale of the loss; None: what the precision needs.
    """

    model: nn.Module | Sequence[nn.Module]
    batches: Sequence[tuple[Any, Any]]
    num_ranks: int
    schedule: str
    num_microbatches: int
    counts: tuple[int, ...]
    num_chunks: int = 1
    replicas: tuple[int, ...] = ()
    recompute: bool = False
    loss: Callable[[Any, Any], Tensor] = mean_cross_entropy
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = descend
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    weigh: Callable[[Any], float] | None = None
    seed: int = 0
    device: str = "cpu"
    options: dict[str, int] = field(default_factory=dict)
    tensor: int = 1
    sequence_parallel: bool = False
    scatter_gather: bool = True
    precision: str = "fp32"
    loss_scale: float | None = None

    @property
    def half(self) -> torch.dtype | None:
        """The type that autocast computes in; None: no autocast."""
        return half_of(self.precision)

    @property
    def first_scale(self) -> float | None:
        """What the first loss is multiplied with; None: losses are not scaled."""
        return first_scale(self.half, self.loss_scale)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind. Where a weight lives on several ranks, each rank's copy is here.

    Attributes:
        losses: of each step.
        gradients: of the first update as the optimizer saw them, by rank and the user's names.
        weights: weights and buffers at the end, by rank and the user's names.
        names: for the reference: of every parameter that trains, each once, in the model's order.
    """

    losses: list[float]
    gradients: dict[int, dict[str, Tensor]]
    weights: dict[int, dict[str, Tensor]]
    names: tuple[str, ...] = ()

    @staticmethod
    def joined(parts: Sequence[Outcome]) -> Outcome:
        """The outcome of all ranks from those of each process; every process has all losses."""
        gradients = {rank: table for part in parts for rank, table in part.gradients.items()}
        weights = {rank: table for part in parts for rank, table in part.weights.items()}
        return Outcome(parts[0].losses, gradients, weights)
