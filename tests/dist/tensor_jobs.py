"""What ranks run in the tests of tensor parallelism."""

from typing import Any

import torch
from torch import Tensor, nn

from pipefit.models import gpt
from pipefit.testing import Outcome, Task, run_pipeline

SIZES = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 12, "context": 6}


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(**(SIZES | options)).double()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, SIZES["vocab"], (2, size, SIZES["context"]), generator=generator)
    return words[0], words[1]


def task(counts: tuple[int, ...], **more: Any) -> Task:
    """A task of a pipeline with a stage per rank, unless it says otherwise."""
    options = more.pop("model", {})
    settings: dict[str, Any] = {
        "model": model(**options),
        "batches": [batch(5, step) for step in range(3)],
        "num_ranks": len(counts),
        "schedule": "1f1b",
        "num_microbatches": 2,
        "counts": counts,
        "tensor": 2,
    }
    return Task(**(settings | more))


TWO = {
    "t=2": task((4,), clip_norm=0.05),
    "t=2, untied, dropout, recomputed": task((4,), model={"tied": False, "dropout": 0.2}, recompute=True),
    "t=2, sequence": task((4,), sequence_parallel=True, clip_norm=0.05),
    "t=2, sequence, dropout": task((4,), sequence_parallel=True, model={"dropout": 0.2}),
}
FOUR = {
    "t=2 p=2": task((2, 2), clip_norm=0.05),
    "t=2 p=2, whole messages, dropout": task((2, 2), scatter_gather=False, model={"dropout": 0.2}),
    "t=2 p=2, sequence": task((2, 2), sequence_parallel=True, clip_norm=0.05, recompute=True),
    "t=2 d=2": task((4,), num_ranks=2, schedule="data-parallel", clip_norm=0.05),
    "t=2 p=2, pipedream": task((2, 2), schedule="pipedream", num_microbatches=1, model={"tied": False}),
}
EIGHT = {
    "2×2×2 interleaved, tied, clipped": task(
        (1, 1, 1, 1),
        num_ranks=4,
        schedule="interleaved",
        num_microbatches=4,
        num_chunks=2,
        replicas=(2,),
        clip_norm=0.05,
    ),
}


def outcomes(tasks: list[Task]) -> list[Outcome]:
    """This process's part of several tasks."""
    return [run_pipeline(task) for task in tasks]
