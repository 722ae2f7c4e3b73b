"""How well the simulator foretells a step: two ranks, each on a core of its own, a GPT that is bound by its arithmetic.

A comparison like any other (`pipefit.compare`), with ranks that stay on their cores: measured over predicted for every
synchronous schedule, and the asynchronous ones against one process that accumulates as many micro-batches.
"""

from __future__ import annotations

import os

from pipefit.compare.config import CompareConfig
from pipefit.compare.measure import compare_on_ranks
from pipefit.compare.result import Comparison
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current

__all__ = ["CONFIG", "prediction", "prediction_rank"]

CONFIG = CompareConfig(
    model="gpt",
    options="layers=8,hidden=256,heads=8,context=128",
    data=("synthetic",),
    strategies=(
        "one-thread", "accumulate", "naive", "gpipe", "1f1b", "interleaved", "breadth-first",
        "pipedream", "pipedream-2bw", "torch-gpipe", "torch-1f1b",
    ),
    microbatches=(4, 8, 32),
    batch=32,
    steps=2,
    repeats=3,
)  # fmt: skip
"""GPT of 8 blocks × 256, sequence 128, batch 32."""


def prediction(config: CompareConfig = CONFIG) -> Comparison:
    """Measures on two ranks of this machine."""
    found: Comparison = launch(prediction_rank, 2, config, threads=1, quiet=True)[0]
    return found


def prediction_rank(config: CompareConfig) -> Comparison:
    """The same on this rank, which stays on one core where the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[current().rank % len(cores)]})
    return compare_on_ranks(config)
