"""torch.distributed.pipelining over the same stages of the same model, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.compare.strategies import bytes_of
from pipefit.errors import PlanError
from pipefit.models.examples import Batch
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import sum_table
from pipefit.runtime.session import current
from pipefit.spec import Partition
from pipefit.stage.split import named_layers
from pipefit.stage.ties import tied_parameters
from pipefit.stage.training import with_metrics

_SCHEDULES = {"torch-gpipe": "ScheduleGPipe", "torch-1f1b": "Schedule1F1B"}


class TorchPipeline:
    """A schedule of torch.distributed.pipelining.

    It does not support weights that stages share; their gradients are summed here after each backward, as its users
    must do.

    Args:
        work: the model and its training.
        partition: one stage per rank.
        num_microbatches: per update.
        schedule: "torch-gpipe" or "torch-1f1b".

    Raises:
        PlanError: it refuses the shape or the kind of batch.
    """

    def __init__(self, work: Workload, partition: Partition, num_microbatches: int, schedule: str) -> None:
        from torch.distributed import pipelining

        num_stages = len(partition.stages)
        rank = current().rank
        ranks = current().num_ranks
        if num_stages != ranks:
            raise PlanError(f"needs one stage per rank, got {num_stages} for {ranks}")
        if schedule == "torch-1f1b" and num_microbatches < ranks:
            raise PlanError(f"it refuses fewer micro-batches ({num_microbatches}) than stages ({ranks})")
        self._rank = rank
        self._last = ranks - 1
        for item in work.example or ():
            if not isinstance(item, Tensor):
                raise PlanError(f"it splits tensors only, and a batch of this model is a {type(item).__name__}")
        whole = work.fresh()
        self._module = nn.Sequential(*(whole[index] for index in partition.stages[rank].layers))
        layers = named_layers(whole)
        mine = [layers[index].module.named_parameters(layers[index].prefix) for index in partition.stages[rank].layers]
        own = dict(chain.from_iterable(mine))
        ties = tied_parameters(layers, partition)
        held = {tie.owner: own[name] for name, tie in ties.items() if name in own}
        # In the model's order, the same on every rank.
        self._tied = [(held.get(name), tie.shape) for name, tie in ties.items() if name == tie.owner]
        self._optimizer = work.optimizer([p for p in self._module.parameters() if p.requires_grad])
        stage = pipelining.PipelineStage(self._module, rank, num_stages, torch.device("cpu"))
        kind: Any = getattr(pipelining, _SCHEDULES[schedule])
        self._schedule = kind(
            stage, n_microbatches=num_microbatches, loss_fn=lambda output, y: with_metrics(work.loss(output, y))[0]
        )

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains; the losses are the last rank's, reported to all at the end."""
        table = torch.zeros(len(batches), dtype=torch.float64)
        for index, (x, y) in enumerate(batches):
            losses: list[Tensor] = []
            inputs = (x,) if self._rank == 0 else ()
            if self._rank == self._last:
                options = {"target": y, "losses": losses}
            else:
                options = {}
            self._schedule.step(*inputs, return_outputs=False, **options)
            for parameter, shape in self._tied:
                if parameter is None or parameter.grad is None:
                    grad = torch.zeros(shape)
                else:
                    grad = parameter.grad
                dist.all_reduce(grad)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if losses:
                table[index] = torch.stack([loss.detach().double() for loss in losses]).mean()
        return sum_table(current(), table).tolist()

    @property
    def state_bytes(self) -> float:
        """Bytes of this rank's stage."""
        return bytes_of([self._module], [self._optimizer])
