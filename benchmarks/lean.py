"""Executor overhead: stages with almost no work, so that all the time is the runtime's own.

All contestants run in the same two processes, alternating; medians are taken.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.compare.strategies import ScheduledPipeline, Trainer
from pipefit.compare.torch_pipeline import TorchPipeline
from pipefit.planner import by_hand
from pipefit.profiling.workload import Workload
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.stage.split import named_layers

_WIDTH, _SAMPLES = 8, 4
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "pipedream", "pipedream-2bw")
TORCH = ("torch gpipe", "torch 1f1b")
BARE = "bare loop"

Runs = Callable[[int], object]


class LeanRow(NamedTuple):
    """One contestant.

    Attributes:
        name: of the schedule.
        num_stages: over two ranks.
        microseconds: per micro-batch and stage, median over the repetitions.
        least: the best repetition.
    """

    name: str
    num_stages: int
    microseconds: float
    least: float


def lean(num_microbatches: int = 16, steps: int = 10, repeats: int = 15, names: Sequence[str] = ()) -> list[LeanRow]:
    """Runs the contest over two ranks of one thread each.

    Args:
        num_microbatches: per update.
        steps: updates of a repetition.
        repeats: repetitions of everything.
        names: contestants; (): all.
    """
    rows: list[LeanRow] = launch(lean_rank, 2, num_microbatches, steps, repeats, tuple(names), threads=1, quiet=True)[0]
    return rows


def lean_rank(num: int, steps: int, repeats: int, names: Sequence[str] = ()) -> list[LeanRow]:
    """The contest on this rank."""
    rank = current().rank
    wanted = names or (BARE, *SCHEDULES, *TORCH)
    contestants = {name: _contestant(name, num, rank) for name in wanted}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.freeze()
    gc.disable()
    for turn in range(repeats + 2):
        for name, (_, run) in contestants.items():
            dist.barrier()
            began = time.perf_counter()
            run(steps)
            dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
        gc.collect()
    gc.enable()
    gc.unfreeze()
    rows = []
    for name, (stages, _) in contestants.items():
        scale = 1e6 / (steps * num * stages)
        rows.append(LeanRow(name, stages, statistics.median(seconds[name]) * scale, min(seconds[name]) * scale))
    return rows


def _contestant(name: str, num: int, rank: int) -> tuple[int, Runs]:
    torch.manual_seed(0)
    chunks = 2 if name.endswith(("interleaved", "breadth-first")) else 1
    stages = 2 * chunks
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(stages)))
    x, y = torch.randn(num * _SAMPLES, _WIDTH), torch.randn(num * _SAMPLES, _WIDTH)
    if name == BARE:
        return stages, _bare(model[rank], x, y, num, rank)
    work = Workload(named_layers(model), nn.functional.mse_loss, _sgd, torch.device("cpu"))
    plan = by_hand(stages, num_ranks=2, schedule=name.removeprefix("torch "), num_microbatches=num, num_chunks=chunks)
    trainer: Trainer = (
        TorchPipeline(work, plan.partition, num, name.replace(" ", "-"))
        if name in TORCH
        else ScheduledPipeline(work, plan)
    )
    return stages, lambda steps: trainer.train([(x, y)] * steps)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def _bare(layer: nn.Module, x: Tensor, y: Tensor, num: int, rank: int) -> Runs:
    """1F1B of two stages by hand: what Gloo and autograd themselves need."""
    optimizer = _sgd(list(layer.parameters()))

    def first() -> None:
        outputs, sends = [], []
        for part in x.tensor_split(num):
            outputs.append(layer(part))
            sends.append(dist.isend(outputs[-1].detach(), 1))
            if len(outputs) > 1:
                _back(outputs[len(outputs) - 2])
        _back(outputs[-1])
        for send in sends:
            send.wait()

    def _back(output: Tensor) -> None:
        grad = torch.empty_like(output)
        dist.recv(grad, 1)
        output.backward(grad)

    def last() -> None:
        sends: list[Any] = []
        buffers = [torch.empty(_SAMPLES, _WIDTH, requires_grad=True) for _ in range(num)]
        receives = [dist.irecv(buffer.data, 0) for buffer in buffers]
        for buffer, receive, target in zip(buffers, receives, y.tensor_split(num), strict=True):
            receive.wait()
            (nn.functional.mse_loss(layer(buffer), target) / num).backward()
            sends.append(dist.isend(buffer.grad, 0))
        for send in sends:
            send.wait()

    def run(steps: int) -> None:
        for _ in range(steps):
            (last if rank else first)()
            optimizer.step()
            optimizer.zero_grad()

    return run


def main(repeats: int = 15, microbatches: int = 16) -> None:
    """Prints µs per micro-batch and stage: the median, and the least of all repetitions."""
    print(f"µs per micro-batch and stage, {microbatches} micro-batches, two ranks; median, and the least of all")
    for row in lean(microbatches, repeats=repeats):
        print(f"{row.name:<18} {row.num_stages} stages {row.microseconds:8.0f} {row.least:8.0f}")
