"""The pipeline's side of a check: trains a case with `pipefit.Pipeline` and records the tensors of every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.worker import Worker
from pipefit.schedules import find
from pipefit.testing.case import Case, Outcome


def make_pipeline(case: Case) -> Pipeline:
    """The pipeline of a case, over a deep copy of its model."""
    return Pipeline(
        copy.deepcopy(case.model),
        loss=case.loss,
        optimizer=case.optimizer,
        stages=None if find(case.schedule).layout == "replicas" else case.counts,
        schedule=case.schedule,
        microbatches=case.request.num_microbatches,
        parallelism=replace(case.request.parallelism, ranks=case.num_processes, device=case.device),
        precision=case.precision,
        updates=case.updates,
    )


def run_pipeline(case: Case) -> Outcome:
    """Trains a case's batches; returns the losses, and gradients and weights of the ranks of this process.

    Without a launcher the process holds all ranks. Under one, every rank calls it, and `Outcome.joined` joins them.
    """
    pipe = make_pipeline(case)
    workers = pipe.workers
    gradients = {worker.rank: _recorded(worker) for worker in workers}
    losses = pipe.fit(case.batches, steps=len(case.batches))
    if case.request.parallelism.tensor > 1:
        gradients = {workers[0].process: _whole(workers[0], gradients[workers[0].rank])}
        return Outcome(list(losses), gradients, {workers[0].process: _whole(workers[0], _state(workers[0]))})
    return Outcome(list(losses), gradients, {worker.rank: _state(worker) for worker in workers})


def _whole(worker: Worker, table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from those of the processes that share a rank; all of them call it."""
    return {name: worker.mesh.whole(name, table[name].to(worker.device)).cpu() for name in sorted(table)}


def _recorded(worker: Worker) -> dict[str, Tensor]:
    """A table that is filled with a rank's gradients just before the first step of its optimizers."""
    table: dict[str, Tensor] = {}
    for stage, optimizer in worker.optimizers.items():
        pairs = list(zip((o.name for o in worker.owned[stage]), worker.stores[stage].masters, strict=True))

        def record(
            optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, pairs: Sequence[tuple[str, Tensor]] = pairs
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
