"""Executor overhead: stages with next to no work, so that all the time is the runtime's own.

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

from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec.options import Parallelism

__all__ = ["LeanRow", "lean", "lean_rank"]

_WIDTH, _SAMPLES = 8, 4
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "pipedream", "pipedream-2bw")
TORCH = ("torch gpipe", "torch 1f1b", "torch interleaved")
BARE = "bare loop"

Runs = Callable[[int], None]


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
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(stages)]
    x, y = torch.randn(num * _SAMPLES, _WIDTH), torch.randn(num * _SAMPLES, _WIDTH)
    if name == BARE:
        return stages, _bare(layers[rank], x, y, num, rank)
    if name in TORCH:
        return stages, _torch(name, layers, x, y, num, rank)
    pipe = Pipeline(
        nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule=name,
        microbatches=num,
        stages=[1] * stages,
        parallelism=Parallelism(chunks=chunks, device="cpu"),
    )
    return stages, lambda steps: _fit(pipe, x, y, steps)


def _fit(pipe: Pipeline, x: Tensor, y: Tensor, steps: int) -> None:
    pipe.fit([(x, y)] * steps, steps=steps)


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


def _torch(name: str, layers: list[nn.Linear], x: Tensor, y: Tensor, num: int, rank: int) -> Runs:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    own = range(rank, len(layers), 2)
    device = torch.device("cpu")
    parts = [PipelineStage(layers[index], index, len(layers), device) for index in own]
    optimizer = _sgd([p for index in own for p in layers[index].parameters()])
    loss = nn.functional.mse_loss
    schedule: Any
    if name == "torch interleaved":
        schedule = ScheduleInterleaved1F1B(parts, n_microbatches=num, loss_fn=loss)
    else:
        kind = ScheduleGPipe if name == "torch gpipe" else Schedule1F1B
        schedule = kind(parts[0], n_microbatches=num, loss_fn=loss)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs = () if rank else (x,)
            schedule.step(*inputs, return_outputs=False, **({"target": y, "losses": []} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()

    return run
