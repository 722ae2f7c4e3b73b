"""The strategies by name, and those that are no pipeline: one process, and torch's data parallel."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipefit.runtime.collectives import sum_table
from pipefit.runtime.microbatches import cut, feed_of
from pipefit.runtime.session import current

__all__ = ["STRATEGIES", "DataParallel", "OneProcess", "Strategy", "Subject", "Trainer"]

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        name: how users ask for it.
        kind: "single", "ddp", "schedule" or "torch".
        about: one line for people.
        splits: whether it splits a batch into micro-batches.
    """

    name: str
    kind: str
    about: str
    splits: bool = True


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("one-thread", "single", "one process, one thread, the whole batch at once", splits=False),
        Strategy("all-threads", "single", "one process, a thread per core, the whole batch at once", splits=False),
        Strategy("accumulate", "single", "one process, one thread, gradients of m micro-batches added up"),
        Strategy("ddp", "ddp", "torch's DistributedDataParallel: each rank a share of the batch, in m/ranks parts"),
        Strategy("data-parallel", "schedule", "data parallelism as a program of pipefit"),
        Strategy("naive", "schedule", "stage after stage, one micro-batch at a time"),
        Strategy("gpipe", "schedule", "all forwards, then all backwards"),
        Strategy("1f1b", "schedule", "one forward, one backward"),
        Strategy("interleaved", "schedule", "1F1B with several stages per rank"),
        Strategy("breadth-first", "schedule", "GPipe with several stages per rank"),
        Strategy("zb-h1", "schedule", "1F1B with backwards in two halves, weight gradients in the gaps"),
        Strategy("pipedream", "schedule", "1F1B without flush, weights stashed"),
        Strategy("pipedream-2bw", "schedule", "1F1B without flush, two weight versions"),
        Strategy("torch-gpipe", "torch", "torch.distributed.pipelining, ScheduleGPipe"),
        Strategy("torch-1f1b", "torch", "torch.distributed.pipelining, Schedule1F1B"),
    )
}
"""Every strategy, in the order of the table."""


@dataclass(frozen=True)
class Subject:
    """The model that every strategy trains.

    Attributes:
        make: a fresh copy of the model, the same on every rank.
        loss: (output, target) -> the mean over the samples.
        optimizer: from parameters to their optimizer.
        num_ranks: of the run.
        rank: of this process.
    """

    make: Callable[[], nn.Sequential]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    num_ranks: int
    rank: int


class Trainer(Protocol):
    """A strategy at work on this rank, with weights of its own."""

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains one update per batch; gives the losses on rank 0, anything on others."""

    @property
    def state_bytes(self) -> float:
        """Of weights and optimizer states that this rank keeps between updates."""


def bytes_of(tensors: Sequence[Tensor]) -> float:
    """Bytes of tensors, shared memory counted once."""
    real = (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")
    storages = {storage.data_ptr(): storage.nbytes() for storage in real}
    return float(sum(storages.values()))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The states of an optimizer."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return bytes_of([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)])


class OneProcess:
    """Rank 0 alone trains; the others wait.

    Args:
        subject: the model.
        num_microbatches: whose gradients are added up before an update.
        threads: of torch while it trains.
    """

    def __init__(self, subject: Subject, num_microbatches: int, threads: int = 1) -> None:
        self._subject, self._num, self._threads = subject, num_microbatches, threads
        if subject.rank == 0:
            self._model = subject.make()
            self._optimizer = subject.optimizer([p for p in self._model.parameters() if p.requires_grad])

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains on rank 0."""
        if self._subject.rank:
            return []
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return [self._step(x, y) for x, y in batches]
        finally:
            torch.set_num_threads(before)

    def _step(self, x: Any, y: Any) -> float:
        total = accumulate(self._model, self._subject.loss, x, y, self._num)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    @property
    def state_bytes(self) -> float:
        """Of the whole model on rank 0."""
        if self._subject.rank:
            return 0.0
        return _kept_bytes(self._model, self._optimizer)


def accumulate(model: nn.Module, loss: Callable[[Any, Any], Tensor], x: Any, y: Any, num: int) -> float:
    """Adds up the gradients of `num` micro-batches and gives the mean loss of the batch."""
    feed = feed_of([(x, y)], num, 0, "train")
    total = torch.zeros(())
    for index, (part, target, share) in enumerate(zip(feed.inputs, feed.targets, feed.shares, strict=True), 1):
        # Torch's data parallel sums over ranks inside the last backward only.
        waits = isinstance(model, DistributedDataParallel) and index < num
        with model.no_sync() if waits else contextlib.nullcontext():
            value = loss(model(part), target) * share
            value.backward()
        total += value.detach()
    return float(total)


class DataParallel:
    """Torch's `DistributedDataParallel`: every rank trains the whole model on its share of each batch."""

    def __init__(self, subject: Subject, num_microbatches: int) -> None:
        self._subject = subject
        self._num = max(1, num_microbatches // subject.num_ranks)
        self._model = DistributedDataParallel(subject.make())
        self._optimizer = subject.optimizer([p for p in self._model.parameters() if p.requires_grad])

    def train(self, batches: Sequence[Batch]) -> Sequence[float]:
        """Trains on this rank's share."""
        losses = []
        ranks, rank = self._subject.num_ranks, self._subject.rank
        for x, y in batches:
            part, target = cut(x, ranks)[rank], cut(y, ranks, "the target")[rank]
            losses.append(accumulate(self._model, self._subject.loss, part, target, self._num))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        table = torch.tensor(losses, dtype=torch.float64)
        return (sum_table(current(), table) / ranks).tolist()

    @property
    def state_bytes(self) -> float:
        """Of the whole model."""
        return _kept_bytes(self._model, self._optimizer)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_s() -> float:
    """Processor time of the calling thread, which does the work of a rank on a CPU."""
    return time.thread_time()
