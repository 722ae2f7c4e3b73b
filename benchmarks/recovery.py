"""Faults: seconds from a rank's death to the next finished step, and the cost of copies in memory per step."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import pipefit as pf
from pipefit.checkpoint.memory import EVERY
from pipefit.pipeline.callbacks import Record
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.units import format_bytes, format_seconds

WIDTHS = (64, 512, 1448)
"""Of four square layers; with Adam a stage's state is three times its weights."""

_LAYERS, _DIES = 4, 10
_LAYOUTS = ((2, 1), (4, 1), (4, 2))
"""Ranks, and copies of the pipeline."""


class CopyRow(NamedTuple):
    """The cost of copies of a training in memory.

    Attributes:
        num_bytes: of the weights and optimizer states.
        without_s: median step without copies.
        with_s: median step with a copy after each.
    """

    num_bytes: int
    without_s: float
    with_s: float


def _train(width: int, copies: int, steps: int, place: str) -> list[float]:
    """Trains; returns the seconds of the steps. Given a place, the last rank dies in the first start."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
    pipe = pf.Pipeline(
        model, loss=nn.MSELoss(), optimizer=torch.optim.Adam, parallelism=pf.Parallelism(data_parallel=copies)
    )
    x = torch.randn(16, width)
    ends = []

    def note(record: Record) -> None:
        ends.append(time.time())
        start = current().start.restart
        if place and start == 0 and record.step == _DIES and pipe.rank == current().num_ranks - 1:
            Path(place, "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if place and start == 1 and pipe.rank == 0 and len(ends) == 1:
            Path(place, "next").write_text(repr(time.time()))

    saves = [pf.Checkpoints(pipe, Path(place) / "checkpoints", every=4)] if place else []
    pipe.fit([(x, x)] * steps, callbacks=[note, *saves])
    return [after - before for before, after in pairwise(ends[1:])]


def go_on_s(ranks: int, copies: int) -> float:
    """Seconds from the death of the last rank to the next finished step."""
    with tempfile.TemporaryDirectory() as place:
        launch(_train, ranks, 64, copies, 20, place, threads=1, quiet=True, recover=1)
        died, went_on = (float(Path(place, name).read_text()) for name in ("killed", "next"))
    return went_on - died


def copy_cost(width: int, repeats: int) -> CopyRow:
    """Steps of two copies of a stage with and without copies in memory, in alternating runs."""
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(repeats):
        for every, found in seconds.items():
            os.environ[EVERY] = every
            found += launch(_train, 2, width, 2, 30, "", threads=1, quiet=True, recover=1)[0]
    del os.environ[EVERY]
    return CopyRow(12 * _LAYERS * width * (width + 1), *(statistics.median(found) for found in seconds.values()))


def main(repeats: int = 3) -> None:
    """Prints both tables; `repeats` runs of each row."""
    for ranks, copies in _LAYOUTS:
        times = [go_on_s(ranks, copies) for _ in range(repeats)]
        middle, least = format_seconds(statistics.median(times)), format_seconds(min(times))
        print(f"{ranks} ranks, {copies} copies: {middle:>9} from a death to the next step, least {least}")
    print("\nstate             step without copies   with a copy each")
    for width in WIDTHS:
        row = copy_cost(width, repeats)
        print(f"{format_bytes(row.num_bytes):<18}{format_seconds(row.without_s):>19}{format_seconds(row.with_s):>19}")
