"""Functions that the processes of the tour run: a process can only be given functions that it can import."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipefit import Parallelism, Pipeline
from pipefit.models import build

SIZES = {"layers": 6, "hidden": 96, "heads": 4, "context": 64}
BATCH = 32
Train = Callable[[], tuple[int, float]]


def compare(cases: list[dict[str, Any]], rounds: int = 6) -> list[dict[str, Any]]:
    """Trains a small GPT in several ways over the ranks of this run: seconds of a step, and the last loss.

    A case has the arguments of a `Pipeline`, or "schedule": "one process": plain PyTorch on rank 0, which accumulates
    the gradients of the same micro-batches. The cases alternate and the fastest step of each is kept, so that other
    programs on the machine affect all alike.
    """
    ways = [_one_process(case["microbatches"]) if _is_single_process(case) else _pipeline(case) for case in cases]
    rows = [{**case, "step_s": float("inf"), "loss": 0.0} for case in cases]
    for train in ways:
        train()  # shapes are known, caches are warm
    for _ in range(rounds):
        for row, train in zip(rows, ways, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            steps, row["loss"] = train()
            row["step_s"] = min(row["step_s"], (time.perf_counter() - begin) / steps)
    return rows


def _is_single_process(case: dict[str, Any]) -> bool:
    return case["schedule"] == "one process"


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05)


def _pipeline(case: dict[str, Any]) -> Train:
    torch.manual_seed(0)
    bundle = build("gpt", **SIZES)
    case, spread = dict(case), Parallelism(chunks=case.get("chunks", 1))
    case.pop("chunks", None)
    pipe = Pipeline(bundle.layers, loss=bundle.loss, optimizer=_sgd, parallelism=spread, **case)
    batch = bundle.example(BATCH, 1)
    steps = 1 if pipe.schedule.is_synchronous else 4  # without a flush steps overlap, and only a segment has a time
    return lambda: (steps, pipe.fit([batch] * steps)[-1])


def _one_process(num_microbatches: int) -> Train:
    torch.manual_seed(0)
    bundle = build("gpt", **SIZES)
    optimizer = _sgd(bundle.layers.parameters())
    x, y = bundle.example(BATCH, 1)

    def train() -> tuple[int, float]:
        total = 0.0
        if dist.get_rank() == 0:
            for a, b in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
                loss = bundle.loss(bundle.layers(a), b) / num_microbatches
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return 1, total

    return train
