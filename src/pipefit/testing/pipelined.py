"""The pipeline's side of a check: trains a task with `pipefit.Pipeline`, and writes down what every rank holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.worker import Worker
from pipefit.schedules import find
from pipefit.spec.options import Parallelism, Precision, Updates
from pipefit.testing.equality_task import Outcome, Task

__all__ = ["make_pipeline", "run_pipeline"]


def make_pipeline(task: Task) -> Pipeline:
    """The pipeline of a task, over a deep copy of its model."""
    one_stage = find(task.schedule).layout == "replicas"
    return Pipeline(
        copy.deepcopy(task.model),
        loss=task.loss,
        optimizer=task.optimizer,
        stages=task.num_ranks if one_stage else task.counts,
        schedule=task.schedule,
        microbatches=task.num_microbatches,
        precision=Precision(task.precision, task.loss_scale),
        parallelism=Parallelism(
            chunks=task.num_chunks,
            replicas=task.replicas,
            recompute=task.recompute,
            tensor=task.tensor,
            sequence_parallel=task.sequence_parallel,
            device=task.device,
            options=task.options,
            whole_messages=not task.scatter_gather,
        ),
        updates=Updates(scheduler=task.scheduler, clip_norm=task.clip_norm, weigh=task.weigh, seed=task.seed),
    )


def run_pipeline(task: Task) -> Outcome:
    """Trains a task's batches; gives the losses, and gradients and weights of the ranks of this process.

    Alone, the process holds all ranks. Under a launcher every rank calls it, and `Outcome.joined` puts the parts
    together.
    """
    pipe = make_pipeline(task)
    workers = pipe.workers
    gradients = {worker.rank: _recorded(worker) for worker in workers}
    losses = pipe.fit(task.batches, steps=len(task.batches))
    if task.tensor > 1:
        gradients = {workers[0].process: _whole(workers[0], gradients[workers[0].rank])}
        return Outcome(list(losses), gradients, {workers[0].process: _whole(workers[0], _state(workers[0]))})
    return Outcome(list(losses), gradients, {worker.rank: _state(worker) for worker in workers})


def _whole(worker: Worker, table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from those of the processes that share a rank; all of them call it."""
    return {name: worker.mesh.whole(name, table[name].to(worker.device)).cpu() for name in sorted(table)}


def _recorded(worker: Worker) -> dict[str, Tensor]:
    """A table that fills with a rank's gradients just before its optimizers first step."""
    table: dict[str, Tensor] = {}
    for stage, optimizer in worker.optimizers.items():
        pairs = list(zip((o.name for o in worker.owned[stage]), worker.stores[stage].masters, strict=True))

        def record(
            optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, pairs: list[tuple[str, Tensor]] = pairs
        ) -> None:
            for name, master in pairs:
                if name not in table:
                    grad = master.grad
                    table[name] = (torch.zeros_like(master) if grad is None else grad).detach().cpu().clone()

        optimizer.register_step_pre_hook(record)
    return table


def _state(worker: Worker) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index, stage in worker.stages.items():
        with worker.presence(index):
            found |= {name: value.detach().cpu().clone() for name, value in stage.state_dict().items()}
    return found
