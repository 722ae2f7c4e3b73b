"""Trainings that lose ranks and get them back while they train; importable by name."""

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.faults.dying_jobs import RANKS, SHAPES, SHARED
from tests.runtime import jobs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipefit import STOP, Checkpoints, Pipeline
from pipefit.pipeline.callbacks import EMA, EarlyStopping, Record
from pipefit.pipeline.loggers import csv_log
from pipefit.pipeline.rearrange import rearrange
from pipefit.planner import by_hand
from pipefit.runtime.meeting import ENTERED, MEMORY
from pipefit.runtime.session import Session, current
from pipefit.spec import Plan

STEPS = 3
"""With all ranks, before the next one dies or the training ends."""

MOVED = "moved"
"""A training whose layers move in its second step, from three in each stage."""

ALL = SHAPES | SHARED | {MOVED: {"rebalance": True, **SHAPES["1f1b"]}}

MOST = 1500
"""Steps after which a training ends in any case."""


class Grown(NamedTuple):
    """The results of a rank.

    Attributes:
        losses: of the steps.
        best: loss of the best evaluation, by averages of the weights.
        weights: of the whole model, with its buffers.
        pid: of the process.
        ranks: at each step that this process has made.
    """

    losses: list[float]
    best: float
    weights: dict[str, Tensor]
    pid: int
    ranks: dict[int, int]


class Life:
    """A callback that kills some ranks, and ends the training when all are there for the last time.

    Args:
        pipe: that is trained.
        deaths: the ranks that die, one after each entry.
        alone: a file for which a training that has lost a rank waits, before it ends without the rank; None: it trains
            until the rank has come back.
    """

    every = 1

    def __init__(self, pipe: Any, deaths: Sequence[int], alone: Path | None, full: int) -> None:
        self._pipe = pipe
        self._deaths = deaths
        self._alone = alone
        self._full = full
        self._steps: Counter[tuple[int, bool]] = Counter()
        self.ranks: dict[int, int] = {}

    def step(self, record: Record) -> Any:
        session = self._pipe.session
        if session.repairs is None:
            return None
        if record.step == 2 and self._pipe.rebalancer is not None:
            rearrange(self._pipe, moved_plan())
        entered = int(os.environ.get(ENTERED, "0"))
        is_whole = session.num_ranks == self._full
        self.ranks[record.step] = session.num_ranks
        self._steps[entered, is_whole] += 1
        if record.step >= MOST:
            return STOP
        if not is_whole:
            time.sleep(0.02)
            while self._alone is not None and not self._alone.exists():
                time.sleep(0.02)
        if self._steps[entered, is_whole] < STEPS:
            return None
        if is_whole and session.start.restart and not entered:
            return STOP
        if entered == len(self._deaths) or (self._alone is not None and not is_whole):
            return STOP
        if is_whole and session.rank == self._deaths[entered]:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def moved_plan() -> Plan:
    """A plan with other stages."""
    return by_hand(6, num_ranks=4, replicas=(2, 2), schedule="1f1b", num_microbatches=4, stages=[2, 4])


def gentle(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of small steps: by larger ones differences of rounding grow tenfold in 20 steps."""
    return torch.optim.SGD(parameters, 2e-4, momentum=0.9)


def pipeline_of(factor: float = 1.0, **options: Any) -> Pipeline:
    """A pipeline in double precision.

    Args:
        factor: of all weights.
        options: of the pipeline.
    """
    model = jobs.model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return jobs.pipeline(model=model, optimizer=gentle, **options)


def loader_of() -> DataLoader[Any]:
    samples = [(x.double(), y) for batch in jobs.batches(5) for x, y in zip(*batch, strict=True)]
    return DataLoader(samples, batch_size=8, shuffle=True)


def train(place: str, deaths: Sequence[int], steps: int = 100_000, outside: str = "", shape: str = "1f1b") -> Grown:
    """Trains in double precision, with all that a run does besides.

    Args:
        place: a folder for its files.
        deaths: see `Life`.
        steps: the most.
        outside: what a process that is started again does: "hang" before it makes its pipeline, or "die" when the
            others let it enter; "": it enters.
        shape: see `SHAPES`, `SHARED` and `MOVED`.
    """
    Path(place, f"{os.getpid()}.pid").write_text(os.environ.get(MEMORY, ""))
    alone = None
    if outside == "hang":
        alone = Path(place, "alone")
    if current().is_outside:
        _suffer(outside, alone)
    options = dict(ALL[shape])
    if not current().is_distributed:
        options.pop("rebalance", None)
    pipe = pipeline_of(**options)
    best = EarlyStopping(pipe, 1000, f"{place}/best")
    life = Life(pipe, deaths, alone, RANKS.get(shape, 4))
    saves = Checkpoints(pipe, f"{place}/checkpoints", every=1, keep=0)
    callbacks = [saves, csv_log(f"{place}/log.csv"), best, life]
    if shape not in SHARED:
        callbacks.insert(3, EMA(pipe, 0.5))
    held_out = [(x.double(), y) for x, y in jobs.batches(1)]
    losses = pipe.fit(loader_of(), steps, callbacks=callbacks, held_out=held_out, evaluate_every=2)
    losses.append(pipe.evaluate(held_out))
    weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return Grown(losses, best.best_loss, weights, os.getpid(), life.ranks)


def _suffer(outside: str, alone: Path | None) -> None:
    if alone is not None:
        alone.touch()
        time.sleep(10_000)
    if outside == "die":
        pytest.MonkeyPatch().setattr(Session, "_renumbered", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def losses_from(checkpoint: Path, steps: int, shape: str) -> list[float]:
    """Losses of an undisturbed training from a checkpoint on."""
    pipe = pipeline_of(**({"plan": moved_plan()} if shape == MOVED else ALL[shape]))
    pipe.load(checkpoint)
    return pipe.fit(loader_of(), steps)


def steps_in(log: Path) -> list[int]:
    """The steps in a log of losses, in the order of its lines; a line with an evaluation has no loss."""
    lines = [line.split(",") for line in log.read_text().splitlines()[1:]]
    return [int(line[0]) for line in lines if line[1]]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def are_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12) for name in other)
