"""torch.distributed.pipelining over the same stages of the same model, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.compare.strategies import Subject, bytes_of, optimizer_tensors
from pipefit.errors import PlanError
from pipefit.runtime.collectives import sum_table
from pipefit.runtime.session import current
from pipefit.spec import Partition

__all__ = ["TorchPipeline"]


class TorchPipeline:
    """A schedule of torch.distributed.pipelining, one stage per rank.

    It knows no weights that stages share; their gradients are summed here after each backward, as its users must.

    Args:
        subject: the model.
        partition: one stage per rank.
        num_microbatches: per update.
        schedule: "torch-gpipe" or "torch-1f1b".

    Raises:
        PlanError: this torch has no pipelining, or it refuses the shape.
    """

    def __init__(self, subject: Subject, partition: Partition, num_microbatches: int, schedule: str) -> None:
        try:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
        except ImportError:
            raise PlanError("this torch has no torch.distributed.pipelining") from None
        if len(partition.stages) != subject.num_ranks:
            raise PlanError(f"needs one stage per rank, got {len(partition.stages)} for {subject.num_ranks}")
        if schedule == "torch-1f1b" and num_microbatches < subject.num_ranks:
            raise PlanError(f"it refuses fewer micro-batches ({num_microbatches}) than stages ({subject.num_ranks})")
        self._rank, self._last = subject.rank, subject.num_ranks - 1
        whole = subject.make()
        own = nn.Sequential(*(whole[index] for index in partition.stages[subject.rank].layers))
        self._tied = _tied(whole, own, partition)
        self._parameters = [p for p in own.parameters() if p.requires_grad]
        self._optimizer = subject.optimizer(self._parameters)
        stage = PipelineStage(own, subject.rank, subject.num_ranks, torch.device("cpu"))
        kind: Any = ScheduleGPipe if schedule == "torch-gpipe" else Schedule1F1B
        self._schedule = kind(stage, n_microbatches=num_microbatches, loss_fn=subject.loss)
        self._module = own

    def train(self, batches: Sequence[tuple[Any, Any]]) -> Sequence[float]:
        """Trains; the losses are the last rank's, reported to all at the end."""
        table = torch.zeros(len(batches), dtype=torch.float64)
        for index, (x, y) in enumerate(batches):
            losses: list[Tensor] = []
            inputs = (x,) if self._rank == 0 else ()
            options = {"target": y, "losses": losses} if self._rank == self._last else {}
            self._schedule.step(*inputs, return_outputs=False, **options)
            for parameter, shape in self._tied:
                grad = torch.zeros(shape) if parameter is None or parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if losses:
                table[index] = torch.stack([loss.detach().double() for loss in losses]).mean()
        return sum_table(current(), table).tolist()

    @property
    def state_bytes(self) -> float:
        """Of this rank's stage."""
        tensors = [*self._module.parameters(), *self._module.buffers(), *optimizer_tensors(self._optimizer)]
        return bytes_of(tensors)


def _tied(whole: nn.Sequential, own: nn.Module, partition: Partition) -> list[tuple[nn.Parameter | None, torch.Size]]:
    """The weights that several stages share, in the model's order: this rank's parameter, or None, and the shape."""
    stage_of = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
    users: dict[int, set[int]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for index, layer in enumerate(whole):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(stage_of[index])
            parameters[id(parameter)] = parameter
    held = {id(parameter) for parameter in own.parameters()}
    return [
        (parameters[key] if key in held else None, parameters[key].shape) for key, of in users.items() if len(of) > 1
    ]
