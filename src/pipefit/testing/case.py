"""A case that is trained by a pipeline and by the reference, and the outcome of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.ir.instruction import Indices
from pipefit.models.examples import Batch, mean_cross_entropy
from pipefit.parallel.loss import Loss
from pipefit.planner import ranks_of
from pipefit.spec.options import Precision, Request, Updates
from pipefit.stage.precision import first_scale, half_of
from pipefit.stage.training import MakeOptimizer


def descend(parameters: list[nn.Parameter]) -> Optimizer:
    """SGD with momentum, the optimizer of a check: unlike Adam it does not hide a wrongly scaled gradient."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


Tensors = dict[str, Tensor]
"""Tensors by their names."""


@dataclass(frozen=True)
class Case:
    """A model, its data and the training of both sides. Neither side changes it: each works on a deep copy.

    Attributes:
        model: an `nn.Sequential` or a list of layers.
        batches: (input, target) of each step, all of one program.
        counts: layers of each stage.
        request: schedule, micro-batches and parallelism of the pipeline, with its number of processes.
        precision: the precision in which both sides compute.
        updates: clipping, learning rates, weights of micro-batches and seed of both sides.
        loss: gives the mean from output and target.
        optimizer: makes an optimizer of parameters.
    """

    model: nn.Module | Sequence[nn.Module]
    batches: Sequence[Batch]
    counts: Indices
    request: Request
    precision: Precision = Precision()
    updates: Updates = Updates()
    loss: Loss = mean_cross_entropy
    optimizer: MakeOptimizer = descend

    @property
    def schedule(self) -> str:
        """The schedule's name."""
        return self.request.schedule or "1f1b"

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, replicas included."""
        return ranks_of(self.num_processes, self.request.parallelism.tensor)

    @property
    def num_processes(self) -> int:
        """Processes of the pipeline, `tensor` for each rank."""
        return self.request.parallelism.ranks or 2

    @property
    def device(self) -> str:
        """The device of both sides."""
        return self.request.parallelism.device or "cpu"

    @property
    def copies(self) -> Indices:
        """Copies of each stage."""
        depth = len(self.counts)
        copies = self.request.parallelism.copies or (1,)
        if len(copies) == 1:
            return copies * depth
        return copies

    @property
    def half(self) -> torch.dtype | None:
        """The type that autocast computes in; None: no autocast."""
        return half_of(self.precision.dtype)

    @property
    def first_scale(self) -> float | None:
        """The factor of the first loss; None: losses are not scaled."""
        return first_scale(self.half, self.precision.loss_scale)


@dataclass(frozen=True)
class Outcome:
    """The losses, gradients and weights of a training run, with each rank's copy of a weight on several ranks.

    Attributes:
        losses: one for each step.
        gradients: the optimizer's gradients at the first update, by rank and the user's names.
        weights: weights and buffers at the end, by rank and the user's names.
        names: every parameter that trains, each once, in the model's order; only the reference has them.
    """

    losses: list[float]
    gradients: dict[int, Tensors]
    weights: dict[int, Tensors]
    names: tuple[str, ...] = ()

    @staticmethod
    def joined(parts: Sequence[Outcome]) -> Outcome:
        """The outcome of all ranks from the outcome of each process; every process has all losses."""
        gradients = {rank: table for part in parts for rank, table in part.gradients.items()}
        weights = {rank: table for part in parts for rank, table in part.weights.items()}
        return Outcome(parts[0].losses, gradients, weights)
