"""Shared weights as a program compared with torch's `fully_shard` (FSDP2): time of an update, and the peak of memory.

Both train the same model with the same data and optimizer in the same processes, one after the other in turns. Each
layer of the model is a stage here, and a module of its own for `fully_shard`: both gather it for its forward and again
for its backward. Memory is that of all tensors before an update, and what torch's profiler records of the allocator
during it, in processes of their own; buffers of Gloo are not in it.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.devices import own_core
from pipefit.models import build, parse_options
from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec.options import Parallelism
from pipefit.units import format_bytes

MODEL = "layers=6,hidden=256,heads=8,context=128,tied=false"

Batch = tuple[Tensor, Tensor]


class SharedRow(NamedTuple):
    """The contest on some processes.

    Attributes:
        processes: that share the weights.
        pipefit_s, theirs_s: medians of the seconds per update.
        ratio: median over the turns of pipefit's time by torch's.
        pipefit_bytes, theirs_bytes: peak on the first process.
        difference: between the losses after all turns.
    """

    processes: int
    pipefit_s: float
    theirs_s: float
    ratio: float
    pipefit_bytes: float
    theirs_bytes: float
    difference: float


def contest(processes: int, options: str = MODEL, batch: int = 8, steps: int = 3, repeats: int = 7) -> SharedRow:
    """Runs the contest on some processes of one thread each.

    Args:
        processes: their number.
        options: of the GPT.
        batch: samples of an update over all processes.
        steps: updates of a turn.
        repeats: turns of each contestant.
    """
    found: list[SharedRow] = launch(contest_rank, processes, options, batch, steps, repeats, threads=1, quiet=True)
    mine, theirs = [launch(peak_rank, processes, which, options, batch, threads=1, quiet=True)[0] for which in (0, 1)]
    return found[0]._replace(pipefit_bytes=mine, theirs_bytes=theirs)


def contest_rank(options: str, batch: int, steps: int, repeats: int) -> SharedRow:
    """The contest on this process."""
    rank, processes = current().rank, dist.get_world_size()
    own_core(rank, processes)
    torch.manual_seed(0)
    bundle = build("gpt", **parse_options(options, "gpt"))
    theirs = copy.deepcopy(bundle.layers)
    batches = [bundle.example(batch, seed) for seed in range(steps)]
    trainers = [_ours(bundle.layers, bundle.loss, processes), _theirs(theirs, bundle.loss, rank, processes)]
    seconds: list[list[float]] = []
    losses = [0.0, 0.0]
    for turn in range(repeats + 1):
        took = [0.0, 0.0]
        for which in (turn % 2, 1 - turn % 2):
            dist.barrier()
            began = time.perf_counter()
            for one in batches:
                losses[which] = trainers[which](*one)
            dist.barrier()
            took[which] = (time.perf_counter() - began) / steps
        if turn:
            seconds.append(took)
    return SharedRow(
        processes,
        statistics.median(mine for mine, _ in seconds),
        statistics.median(other for _, other in seconds),
        statistics.median(mine / other for mine, other in seconds),
        0.0,
        0.0,
        abs(losses[0] - losses[1]),
    )


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def _ours(layers: nn.Sequential, loss: Callable[..., Tensor], processes: int) -> Callable[[Tensor, Tensor], float]:
    pipe = Pipeline(
        layers,
        loss=loss,
        optimizer=_optimizer,
        schedule="breadth-first",
        microbatches=processes,
        stages=[1] * len(layers),
        parallelism=Parallelism(ranks=processes, replicas=processes, chunks=len(layers), shard="weights"),
    )
    return lambda x, y: float(pipe.step(x, y))


def _theirs(
    layers: nn.Sequential, loss: Callable[..., Tensor], rank: int, processes: int
) -> Callable[[Tensor, Tensor], float]:
    mesh = init_device_mesh("cpu", (processes,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    optimizer = _optimizer(layers.parameters())

    def step(x: Tensor, y: Tensor) -> float:
        mine = slice(rank * len(x) // processes, (rank + 1) * len(x) // processes)
        value = loss(layers(x[mine]), y[mine])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach()
        dist.all_reduce(total)
        return float(total) / processes

    return step


def peak_rank(which: int, options: str, batch: int) -> float:
    """The most bytes of tensors that one contestant holds at once on this process, in a process of its own."""
    rank, processes = current().rank, dist.get_world_size()
    torch.manual_seed(0)
    bundle = build("gpt", **parse_options(options, "gpt"))
    if which:
        step = _theirs(bundle.layers, bundle.loss, rank, processes)
    else:
        step = _ours(bundle.layers, bundle.loss, processes)
    one = bundle.example(batch, 0)
    for _ in range(2):
        step(*one)
    gc.collect()
    held = sum(_storages().values())
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(*one)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return held + max(accumulate(event.nbytes() for event in events))


def _storages() -> dict[int, int]:
    """The bytes of the memory of all tensors that are alive, by its address."""
    tensors = [value for value in gc.get_objects() if isinstance(value, Tensor) and value.layout == torch.strided]
    held = [tensor for tensor in tensors if not (isinstance(tensor, DTensor) or tensor.is_meta)]
    storages = [tensor.untyped_storage() for tensor in held]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def main(processes: Sequence[int] = (2, 4), options: str = MODEL, batch: int = 8, repeats: int = 7) -> None:
    """Prints seconds per update and peak bytes of both, and their ratios."""
    for count in processes:
        row = contest(count, options, batch, repeats=repeats)
        ratio = row.pipefit_bytes / row.theirs_bytes
        print(
            f"{row.processes} processes: {1e3 * row.pipefit_s:.1f} ms, fully_shard {1e3 * row.theirs_s:.1f} ms, ratio "
            f"{row.ratio:.3f}; peak {format_bytes(row.pipefit_bytes)}, fully_shard {format_bytes(row.theirs_bytes)}, "
            f"ratio {ratio:.3f}; losses differ by {row.difference:.1e}"
        )
