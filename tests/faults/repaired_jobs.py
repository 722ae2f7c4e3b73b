"""Trainings with copies of stages that lose ranks and go on in the same processes; importable by name."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.runtime import jobs
from torch import Tensor
from torch.utils.data import DataLoader

from pipefit import Checkpoints
from pipefit.pipeline.loggers import csv_log
from pipefit.runtime.session import current


class Death(NamedTuple):
    """The place at which a rank dies.

    Attributes:
        rank: its number at the start.
        count: it has come to as many instructions and places since its pipeline was made.
        act: the signal that it gets.
    """

    rank: int
    count: int
    act: int = signal.SIGKILL


class Trained(NamedTuple):
    """What a rank has at the end.

    Attributes:
        figures: losses of the steps, and of evaluations.
        weights: of the whole model, with its buffers.
        pid: of the process.
        count: of the instructions and places to which it came.
        files: open descriptors.
    """

    figures: list[float]
    weights: dict[str, Tensor]
    pid: int
    count: int
    files: int


def train(place: str, options: dict[str, Any], deaths: list[Death]) -> Trained:
    """Trains in double precision, with all that a run does besides; ranks get signals at some places."""
    number = current().rank
    pipe = jobs.pipeline(model=jobs.model().double(), **options)
    count = counted([death for death in deaths if death.rank == number and not current().start.restart])
    data = [(x.double(), y) for x, y in jobs.batches(5)]
    loader = DataLoader([(x, y) for batch in data for x, y in zip(*batch, strict=True)], batch_size=8, shuffle=True)
    callbacks = [Checkpoints(pipe, f"{place}/checkpoints", every=2), csv_log(f"{place}/log.csv")]
    figures = pipe.fit(loader, 3, callbacks=callbacks, held_out=data[:1], evaluate_every=2)
    figures += pipe.fit(loader, 2)
    figures.append(pipe.evaluate(data[:2]))
    figures += [pipe.step(*batch) for batch in data[:2]]
    weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.report()
    pipe.close()
    return Trained(figures, weights, os.getpid(), len(count), len(os.listdir("/proc/self/fd")))  # noqa: PTH208


def counted(deaths: list[Death]) -> list[None]:
    """A list that grows with every place to which this rank comes; there it gets its signals."""
    found: list[None] = []
    progress = current().progress
    original: Callable[..., None] = progress.at

    def at(here: int, waits: bool = False) -> None:
        original(here, waits)
        found.append(None)
        for death in deaths:
            if death.count == len(found):
                os.kill(os.getpid(), death.act)

    progress.at = at  # type: ignore[method-assign]
    return found


def steps_in(log: Path) -> list[str]:
    """The steps in a log, in the order of its lines."""
    return [line.partition(",")[0] for line in log.read_text().splitlines()[1:]]
