"""Data parallelism as a program compared with torch's DistributedDataParallel: the same model, data and optimizer.

Both run in the same two processes and alternate, a few updates each, so that other programs on the machine affect both
alike. The result is the median of the ratios of all repetitions.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.devices import own_core
from pipefit.compare.strategies import DataParallel, ScheduledPipeline, Trainer
from pipefit.models import build, parse_options
from pipefit.planner import by_hand
from pipefit.profiling.workload import Workload
from pipefit.run.optimizers import make_optimizer
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.stage.split import named_layers

_RANKS = 2
MODELS = (
    ("gpt", "layers=4,hidden=128,heads=4,context=64", 16),
    ("gpt", "layers=6,hidden=256,heads=8,context=64", 16),
    ("mlp", "layers=8,width=1024", 32),
)
"""(model, options, samples of an update over both ranks); the last has much to reduce and little to compute."""


class DdpRow(NamedTuple):
    """One model at one number of micro-batches per rank and update.

    Attributes:
        model: with its options.
        num_microbatches: per rank and update.
        pipefit_s: seconds per update, median.
        ddp_s: likewise.
        ratio: median over the turns of pipefit's time by DDP's: below 1 pipefit is faster.
        processor_ratio: the same for the processor time of all threads of rank 0.
    """

    model: str
    num_microbatches: int
    pipefit_s: float
    ddp_s: float
    ratio: float
    processor_ratio: float


def ddp(
    models: Sequence[tuple[str, str, int]] = MODELS,
    num_microbatches: Sequence[int] = (1, 4),
    steps: int = 4,
    repeats: int = 15,
) -> list[DdpRow]:
    """Runs the contest over two ranks of one thread each.

    Args:
        models: name, options and batch.
        num_microbatches: per rank and update.
        steps: updates of a turn.
        repeats: turns of each contestant.
    """
    rows: list[DdpRow] = launch(
        ddp_rank, _RANKS, tuple(models), tuple(num_microbatches), steps, repeats, threads=1, quiet=True
    )[0]
    return rows


def ddp_rank(
    models: Sequence[tuple[str, str, int]], num_microbatches: Sequence[int], steps: int, repeats: int
) -> list[DdpRow]:
    """The contest on this rank, which stays on one core where the system lets it."""
    own_core(current().rank, _RANKS)
    return [_row(*model, num, steps, repeats) for model in models for num in num_microbatches]


def _row(name: str, options: str, batch: int, num: int, steps: int, repeats: int) -> DdpRow:
    torch.manual_seed(0)
    bundle = build(name, **parse_options(options, name))
    layers = named_layers(bundle.layers)
    work = Workload(layers, bundle.loss, make_optimizer("adamw", 1e-3), torch.device("cpu"))
    plan = by_hand(
        len(layers),
        num_ranks=_RANKS,
        schedule="data-parallel",
        num_microbatches=num * _RANKS,
    )
    contestants: list[Trainer] = [ScheduledPipeline(work, plan), DataParallel(work, num * _RANKS)]
    batches = [bundle.example(batch, seed) for seed in range(steps)]
    seconds: list[tuple[float, float]] = []
    used: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    for turn in range(repeats + 2):
        # Who begins alternates: what one leaves in the caches and allocators is there for the other.
        order = (0, 1) if turn % 2 else (1, 0)
        found = {which: _turn(contestants[which], batches) for which in order}
        if turn >= 2:
            seconds.append((found[0][0] / steps, found[1][0] / steps))
            used.append((found[0][1], found[1][1]))
        gc.collect()
    gc.enable()
    return DdpRow(
        f"{name} {options}",
        num,
        statistics.median(mine for mine, _ in seconds),
        statistics.median(theirs for _, theirs in seconds),
        statistics.median(mine / theirs for mine, theirs in seconds),
        statistics.median(mine / theirs for mine, theirs in used),
    )


def _turn(trainer: Trainer, batches: Sequence[Any]) -> tuple[float, float]:
    """Seconds and processor seconds of a few updates, between two barriers."""
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    trainer.train(batches)
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - used


def main(repeats: int = 15, microbatches: tuple[int, ...] = (1, 4), options: str = "", steps: int = 4) -> None:
    """Prints seconds per update of both; `options` of a GPT replace the usual models."""
    models = (("gpt", options, 16),) if options else MODELS
    print("seconds per update on two ranks; the ratio is the median over the turns, below 1: faster than DDP")
    for row in ddp(models, microbatches, steps, repeats):
        print(
            f"{row.model:<46} {row.num_microbatches} per rank: pipefit {row.pipefit_s:.4f}, DDP {row.ddp_s:.4f}, "
            f"ratio {row.ratio:.3f}, of processor time {row.processor_ratio:.3f}"
        )
