"""The pipeline's side of a check: trains a case with `pipefit.Pipeline` and records the tensors of every rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.worker import Worker
from pipefit.schedules import find
from pipefit.testing.case import Case, Outcome, Tensors


def make_pipeline(case: Case) -> Pipeline:
    """The pipeline of a case, over a deep copy of its model."""
    stages: Sequence[int] | None = case.counts
    if find(case.schedule).layout == "replicas":
        stages = None
    parallelism = replace(case.request.parallelism, ranks=case.num_processes, device=case.device)
    return Pipeline(
        copy.deepcopy(case.model),
        loss=case.loss,
        optimizer=case.optimizer,
        stages=stages,
        schedule=case.schedule,
        microbatches=case.request.num_microbatches,
        parallelism=parallelism,
        precision=case.precision,
        updates=case.updates,
    )


def run_pipeline(case: Case) -> Outcome:
    """Trains a case's batches; returns the losses, and gradients and weights of the ranks of this process.

    Without a launcher the process holds all ranks. Under one, every rank calls it, and `Outcome.joined` joins them.
    """
    pipe = make_pipeline(case)
    recorded = [(worker, _recorded(worker)) for worker in pipe.workers]
    losses = list(pipe.fit(case.batches, steps=len(case.batches)))
    gradients = {}
    weights = {}
    for worker, table in recorded:
        if case.request.parallelism.tensor > 1:
            gradients[worker.process] = _whole(worker, table)
            weights[worker.process] = _whole(worker, _state(worker))
        else:
            gradients[worker.rank] = table
            weights[worker.rank] = _state(worker)
    return Outcome(losses, gradients, weights)


def _whole(worker: Worker, table: Tensors) -> Tensors:
    """Whole tensors from the shards of the processes that share a rank; all of them call it."""
    found = {}
    for name in sorted(table):
        part = table[name].to(worker.device)
        found[name] = worker.mesh.whole(name, part).cpu()
    return found


def _recorded(worker: Worker) -> Tensors:
    """A table that is filled with a rank's gradients just before the first step of its optimizers."""
    table = {}

    def record(named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, master in named.items():
            if name not in table:
                grad = master.grad
                if grad is None:
                    grad = torch.zeros_like(master)
                table[name] = grad.detach().cpu().clone()

    for stage, optimizer in worker.optimizers.items():
        names = [one.name for one in worker.owned[stage]]
        masters = dict(zip(names, worker.stores[stage].masters, strict=True))
        optimizer.register_step_pre_hook(partial(record, masters))
    return table


def _state(worker: Worker) -> Tensors:
    found = {}
    for index, stage in worker.stages.items():
        with worker.presence(index):
            for name, value in stage.state_dict().items():
                found[name] = value.detach().cpu().clone()
    return found
