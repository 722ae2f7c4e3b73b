"""The strategies: one process, torch's data parallel, schedules of pipefit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipefit.models.examples import Batch
from pipefit.pipeline.pipeline import Pipeline
from pipefit.planner import by_hand
from pipefit.profiling.tensors import tensors_of
from pipefit.profiling.untouched import with_threads
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import sum_table
from pipefit.runtime.microbatches import cut, feed_of
from pipefit.runtime.session import current
from pipefit.runtime.worker import layers_of
from pipefit.schedules import find
from pipefit.spec import Partition, Plan, Profile
from pipefit.spec.options import Parallelism, Updates
from pipefit.stage.record_layout import storage_bytes
from pipefit.stage.training import with_metrics
from pipefit.timeline import Timeline


class Trainer(Protocol):
    """A strategy as it runs on this rank, with its own weights."""

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains one update per batch; returns the losses on rank 0, anything on others."""

    @property
    def state_bytes(self) -> float:
        """Bytes of weights and optimizer states that this rank keeps between updates."""


def bytes_of(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Bytes of weights, buffers and the states of optimizers; shared memory counts once."""
    tensors = []
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    for optimizer in optimizers:
        tensors += tensors_of(list(optimizer.state.values()))
    return float(storage_bytes(tensor for tensor in tensors if not tensor.is_meta))


class _WholeModel:
    """The whole model in this process, trained in plain torch.

    Args:
        model: the model, or torch's data parallel of it.
        work: its training.
        num_microbatches: whose gradients are added up before an update.
    """

    def __init__(self, model: nn.Module, work: Workload, num_microbatches: int) -> None:
        self._model = model
        self._loss = work.loss
        self._num = num_microbatches
        self._optimizer = work.optimizer([p for p in model.parameters() if p.requires_grad])

    def update(self, x: Any, y: Any) -> float:
        """Steps by the summed gradients of the micro-batches and returns the mean loss of the batch."""
        total = torch.zeros(())
        for index, part in enumerate(feed_of((x, y), self._num, 0, "train"), 1):
            # Torch's data parallel sums over ranks inside the last backward only.
            quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if isinstance(self._model, DistributedDataParallel) and index < self._num:
                quiet = self._model.no_sync()
            with quiet:
                value = with_metrics(self._loss(self._model(part.input), part.target))[0] * part.share
                value.backward()
            total += value.detach()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    @property
    def state_bytes(self) -> float:
        """Bytes of the model and of its optimizer's states."""
        return bytes_of([self._model], [self._optimizer])


class OneProcess(_WholeModel):
    """Training on rank 0 only.

    Args:
        work: the model and its training.
        num_microbatches: whose gradients are added up before an update.
        threads: of torch while it trains.
    """

    def __init__(self, work: Workload, num_microbatches: int, threads: int) -> None:
        super().__init__(work.fresh(), work, num_microbatches)
        self._threads = threads

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains on all samples of the batches."""
        with with_threads(self._threads):
            return [self.update(x, y) for x, y in batches]


class Waiting:
    """A rank that waits while another one trains."""

    state_bytes = 0.0

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Does nothing."""
        return []


class DataParallel(_WholeModel):
    """Torch's `DistributedDataParallel`: every rank trains the whole model on its share of each batch."""

    def __init__(self, work: Workload, num_microbatches: int) -> None:
        session = current()
        super().__init__(DistributedDataParallel(work.fresh()), work, max(1, num_microbatches // session.num_ranks))
        self._session = session

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains on this rank's share."""
        losses = []
        ranks = self._session.num_ranks
        rank = self._session.rank
        for x, y in batches:
            losses.append(self.update(cut(x, ranks)[rank], cut(y, ranks, "the target")[rank]))
        table = torch.tensor(losses, dtype=torch.float64)
        return (sum_table(self._session, table) / ranks).tolist()


def plan_of(schedule: str, num_microbatches: int, partition: Partition, profile: Profile, num_chunks: int) -> Plan:
    """The plan of a schedule: the given partition where it has one stage per rank, else one balanced by the profile."""
    chunks = 1
    if find(schedule).chunks:
        chunks = num_chunks
    stages = None
    if chunks == 1 and find(schedule).layout != "replicas":
        stages = [len(stage.layers) for stage in partition.stages]
    return by_hand(
        len(profile),
        num_ranks=current().num_ranks,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_chunks=chunks,
        stages=stages,
        profile=profile,
    )


class ScheduledPipeline:
    """A pipeline under one schedule.

    Args:
        work: the model and its training.
        plan: its stages and schedule.
        seed: of dropout.

    Raises:
        PipefitError: the schedule does not support the plan's shape.
    """

    def __init__(self, work: Workload, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.pipe = Pipeline(
            work.fresh(),
            loss=work.loss,
            optimizer=work.optimizer,
            plan=plan,
            parallelism=Parallelism(device=work.device),
            updates=Updates(seed=seed),
        )

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains one update per batch; a schedule without a flush drains at the end."""
        return self.pipe.fit(list(batches), steps=len(batches))

    def timeline(self, steps: int) -> Timeline:
        """The last updates as measured; every rank calls it."""
        return self.pipe.timeline(last=self.num_passes(steps))

    def num_passes(self, steps: int) -> int:
        """Passes over the program that some updates take."""
        if self.pipe.schedule.is_synchronous:
            return steps
        return 1

    @property
    def state_bytes(self) -> float:
        """Bytes of the stages of this rank."""
        workers = self.pipe.workers
        layers = [layer.module for layer in layers_of(workers)]
        return bytes_of(layers, [made for worker in workers for made in worker.optimizers.values()])
