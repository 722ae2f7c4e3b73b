"""How well the simulator foretells a step: two ranks, each on a core of its own, and models bound by their arithmetic.

Comparisons like any other (`pipefit.compare`), with ranks that stay on their cores: measured over predicted for every
synchronous schedule, and the asynchronous ones against one process that accumulates as many micro-batches. Each number
of micro-batches is measured for itself, all its strategies in turns, and told at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from pipefit.compare.bench.devices import own_core
from pipefit.compare.found import Comparison, Row
from pipefit.compare.measure import compare_on_ranks
from pipefit.compare.settings import CompareConfig
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current

__all__ = ["CONFIGS", "CONVNET", "CONVNET_LARGE", "GPT", "prediction", "prediction_rank"]

_ALONE = "one-thread"
_SYNCHRONOUS = ("accumulate", "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1")
_OTHERS = ("pipedream", "pipedream-2bw", "torch-gpipe", "torch-1f1b")
_MIDDLE = 8

GPT = CompareConfig(
    model="gpt",
    options="layers=8,hidden=256,heads=8,context=128,tied=false",
    data=("synthetic",),
    strategies=(_ALONE, *_SYNCHRONOUS, *_OTHERS),
    microbatches=(4, 8, 32),
    batch=32,
    steps=1,
    repeats=8,
    segment=64,
)
"""GPT of 8 blocks × 256, sequence 128, batch 32.

The embedding is not tied to the head. A tied weight is stepped by both its stages at once, from the gradients of both:
then the last stage waits at each update for the first one's last backward, which costs the schedules without a flush
about a twentieth of their time at 8 micro-batches per update. `--option` with `tied=true` shows it.
"""

CONVNET = CompareConfig(
    model="convnet",
    data=("synthetic",),
    strategies=(_ALONE, *_SYNCHRONOUS),
    microbatches=(4, 8, 32),
    batch=64,
    steps=10,
    repeats=25,
)
"""The small convolutional network with batch norm, whose steps take some tens of milliseconds.

Its turns are short, as a longer one would be at several paces on a shared server.
At 32 micro-batches of two samples an instruction takes as long as a message.
"""

CONVNET_LARGE = replace(CONVNET, batch=256, steps=4)
"""The same at a batch at which one would divide it: micro-batches of 8 to 64 samples."""

CONFIGS = (GPT, CONVNET, CONVNET_LARGE)


def prediction(configs: Sequence[CompareConfig] = CONFIGS) -> list[Comparison]:
    """Measures on two ranks of this machine; rank 0 tells each row on standard error as soon as it is known."""
    found: list[Comparison] = launch(prediction_rank, 2, tuple(configs), threads=1)[0]
    return found


def prediction_rank(configs: Sequence[CompareConfig]) -> list[Comparison]:
    """The same on this rank, which stays on one core where the system lets it."""
    own_core(current().rank, current().num_ranks)
    return [_every_count(config) for config in configs]


def _every_count(config: CompareConfig) -> Comparison:
    """One comparison for each number of micro-batches, put together."""
    _tell(f"{config.model} {config.options}, {config.batch} samples per update")
    whole: Comparison | None = None
    middle = _MIDDLE if _MIDDLE in config.microbatches else config.microbatches[0]
    for num in config.microbatches:
        # What does not depend on the number, or is aimed at for one number only, is measured once.
        once = () if num == middle else (_ALONE, "pipedream", "pipedream-2bw")
        names = tuple(name for name in config.strategies if name not in once)
        part = compare_on_ranks(replace(config, microbatches=(num,), strategies=names))
        for row in part.rows:
            _tell(_line(row))
        rows = [*(whole.rows if whole else []), *part.rows]
        refused = [*(whole.refused if whole else []), *part.refused]
        whole = replace(part, rows=rows, refused=refused)
    assert whole is not None
    return whole.with_speedups()


def _line(row: Row) -> str:
    says = [f"  m={row.num_microbatches:<3} {row.strategy:<14} {row.step_s * 1e3:9.2f} ms"]
    if row.predicted_step_s and row.predicted_over_measured:
        says.append(
            f"predicted {row.predicted_step_s * 1e3:9.2f} ms, measured/predicted {1 / row.predicted_over_measured:.3f}"
        )
    if row.pace:
        says.append(f"pace {row.pace:.3f}")
    if row.speedup_accumulated:
        says.append(f"{row.speedup_accumulated:.2f} x one process accumulating as many")
    return "  ".join(says)


def _tell(line: str) -> None:
    if current().rank == 0:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
