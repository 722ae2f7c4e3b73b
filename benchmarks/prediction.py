"""Accuracy of predictions: two ranks, each on its own core, and models that are limited by arithmetic.

Comparisons like any other (`pipefit.compare`), with ranks that stay on their cores. Each number of micro-batches is
measured in a comparison of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.devices import own_core
from pipefit.cli.compare import table
from pipefit.compare.comparison import Comparison
from pipefit.compare.rounds import compare_on_ranks
from pipefit.compare.settings import CompareConfig
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current

_SYNCHRONOUS = ("accumulate", "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1")
_OTHERS = ("pipedream", "pipedream-2bw", "torch-gpipe", "torch-1f1b")

GPT = CompareConfig(
    model="gpt",
    option="layers=8,hidden=256,heads=8,context=128,tied=false",
    data=("synthetic",),
    strategies=",".join(("one-thread", *_SYNCHRONOUS, *_OTHERS)),
    microbatches=(4, 8, 32),
    batch=32,
    steps=1,
    repeats=8,
    limit=10.0,
)
"""GPT of 8 blocks × 256, sequence 128, 32 samples per update.

The embedding is not tied to the head: a tied weight is stepped from the gradients of two stages, so the last stage
waits at each update for the first stage's last backward. That costs the schedules without a flush about a twentieth of
their time at 8 micro-batches per update.
"""

CONVNET = CompareConfig(
    model="convnet",
    data=("synthetic",),
    strategies=",".join(("one-thread", *_SYNCHRONOUS)),
    microbatches=(4, 8, 32),
    batch=64,
    steps=10,
    repeats=25,
    limit=10.0,
)
"""The small convolutional network with batch norm, whose steps take some tens of milliseconds.

At 32 micro-batches of two samples an instruction takes as long as a message.
"""

CONVNET_LARGE = replace(CONVNET, batch=256, steps=4)
"""The same with micro-batches of 8 to 64 samples, at which one would split it."""

CONFIGS = (GPT, CONVNET, CONVNET_LARGE)


def main(repeats: int | None = None, microbatches: tuple[int, ...] = ()) -> None:
    """Measures `CONFIGS` on two ranks and prints a table of each.

    Args:
        repeats: of every cell; default: each configuration's own.
        microbatches: numbers of them per update; default: each configuration's own.
    """
    configs = tuple(
        replace(one, repeats=repeats or one.repeats, microbatches=tuple(microbatches) or one.microbatches)
        for one in CONFIGS
    )
    for result in launch(on_ranks, 2, configs, threads=1)[0]:
        print(table(result))


def on_ranks(configs: Sequence[CompareConfig]) -> list[Comparison]:
    """Measures on this rank, which stays on one core; rank 0 reports each number of micro-batches on standard error."""
    own_core(current().rank, current().num_ranks)
    return [_every_count(config) for config in configs]


def _every_count(config: CompareConfig) -> Comparison:
    """One comparison for each number of micro-batches, joined."""
    whole: Comparison | None = None
    for num in config.microbatches:
        part = compare_on_ranks(replace(config, microbatches=(num,)))
        if current().rank == 0:
            sys.stderr.write(f"{config.model}, {config.batch} samples, {num} micro-batches: measured\n")
        if whole is not None:
            # The whole batch at once does not depend on the number of micro-batches.
            rows = [*whole.rows, *(row for row in part.rows if row.strategy != "one-thread")]
            part = replace(part, rows=rows, refused=[*whole.refused, *part.refused])
        whole = part
    assert whole is not None
    return whole.with_speedups()
