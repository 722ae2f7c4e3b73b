"""Trainings that suffer at random moments while they grow again, or while layers move; importable by name."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.faults.dying_jobs import SHAPES, SHARED, num_sockets
from tests.faults.grown_jobs import is_running, loader_of, pipeline_of
from tests.runtime import jobs
from torch import Tensor

from pipefit import STOP, Checkpoints, Pipeline
from pipefit.pipeline.callbacks import Record
from pipefit.pipeline.loggers import csv_log
from pipefit.pipeline.rebalancing import Rebalancer
from pipefit.pipeline.request import Decision
from pipefit.runtime.meeting import ENTERED, MEMORY
from pipefit.runtime.session import Session, current
from pipefit.spec import Layer, Profile

START, FEWER, ENTRY, LOOK, MOVE = "start", "fewer", "entry", "look", "move"
"""The anchors of a fault: a process has made its pipeline, makes a step with fewer ranks, begins to meet a process that
enters; it looks at its times, is about to move layers. Another one is "step 8", before that step is saved."""

_MOST = 1500
"""Steps after which a training ends in any case."""


class Fault(NamedTuple):
    """A signal that a process sends itself.

    Attributes:
        home: the rank of the process at the beginning; a process that is started again has the same.
        is_new: it comes to the process that was started again.
        anchor: of its moment; each process takes it once.
        seconds: after that.
        number: of the signal.
    """

    home: int
    is_new: bool
    anchor: str
    seconds: float
    number: int = signal.SIGKILL


class Job(NamedTuple):
    """A training.

    Attributes:
        shape: see `SHAPES` and `SHARED`.
        faults: that come.
        every: steps between checkpoints.
        pauses: whether the training pauses after each step; else a loss is read while the next step runs.
        evaluates: steps between evaluations; 0: there are none.
        by_stage: all copies of a stage are slow; else one rank is.
        moves: layers, or shares of the batch, move while the run grows.
    """

    shape: str
    faults: list[Fault]
    every: int = 2
    pauses: bool = True
    evaluates: int = 0
    by_stage: bool = False
    moves: bool = False


class Trained(NamedTuple):
    """The results of a rank.

    Attributes:
        losses: of all steps.
        weights: of the whole model, with its buffers.
        sockets: open ones.
        seconds: of training, where layers move.
        is_new: this process was started again while the others trained.
        outside_s: seconds until it entered.
        meeting_s: seconds from there to its first step.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    sockets: int
    seconds: float = 0.0
    is_new: bool = False
    outside_s: float = 0.0
    meeting_s: float = 0.0


class Suffering:
    """The faults of this process."""

    def __init__(self, place: str, faults: list[Fault]) -> None:
        self._place = place
        session = current()
        is_new = session.is_outside
        home = session.rank
        self._left = []
        if is_new or not session.start.restart:
            for number, fault in enumerate(faults):
                if (fault.home, fault.is_new) == (home, is_new) and not Path(place, f"armed-{number}").exists():
                    self._left.append((number, fault))

    def at(self, anchor: str) -> None:
        """Lets the clocks of the faults at an anchor run."""
        for one in list(self._left):
            number, fault = one
            if fault.anchor == anchor:
                self._left.remove(one)
                Path(self._place, f"armed-{number}").write_text(str(os.getpid()))
                if not fault.seconds:
                    self._strike(number, fault)
                timer = threading.Timer(fault.seconds, self._strike, one)
                timer.daemon = True
                timer.start()

    def step(self, record: Record) -> None:
        """A callback."""
        self.at(f"step {record.step}")

    def _strike(self, number: int, fault: Fault) -> None:
        Path(self._place, f"struck-{number}").touch()
        os.kill(os.getpid(), fault.number)


class Life:
    """A callback that ends the training some steps after the last change.

    Args:
        pipe: that is trained.
        place: a folder for its files.
        suffering: of this process.
        full: ranks at the beginning.

    Attributes:
        calm: steps that follow the last change before the training ends.
    """

    calm = 4

    def __init__(self, pipe: Pipeline, place: str, suffering: Suffering, full: int) -> None:
        self._pipe = pipe
        self._place = Path(place)
        self._suffering = suffering
        self._full = full
        self._steps: Counter[tuple[object, ...]] = Counter()

    def step(self, record: Record) -> Any:
        session = self._pipe.session
        if not session.is_distributed and session.repairs is None:
            return None
        is_whole = session.num_ranks == self._full
        over = is_whole or self._is_over()
        if not is_whole:
            self._suffering.at(FEWER)
            time.sleep(0.02)
        if record.step >= _MOST:
            return STOP
        struck = len(list(self._place.glob("struck-*")))
        key = (session.num_ranks, os.environ.get(ENTERED), session.num_faults, struck, over)
        self._steps[key] += 1
        if over and self._steps[key] >= self.calm and not self._is_pending():
            return STOP
        return None

    def _is_over(self) -> bool:
        """Whether no process enters any more: the newest that was started again has ended before."""
        found = sorted(self._place.glob("*.new"), key=lambda path: path.stat().st_mtime_ns)
        return bool(found) and not is_running(int(found[-1].stem))

    def _is_pending(self) -> bool:
        """Whether a process that is there awaits a fault."""
        for path in self._place.glob("armed-*"):
            number = path.name.rpartition("-")[2]
            text = path.read_text()
            if not (self._place / f"struck-{number}").exists() and text and is_running(int(text)):
                return True
        return False


def grow(job: Job, place: str, full: int) -> Trained:
    """Trains in double precision until all that is to happen has happened."""
    began = time.perf_counter()
    session = current()
    is_new = session.is_outside
    Path(place, f"{os.getpid()}.pid").write_text(os.environ.get(MEMORY, ""))
    if is_new:
        Path(place, f"{os.getpid()}.new").touch()
    suffering = Suffering(place, job.faults)
    pipe = pipeline_of(rebalance=job.moves, **(SHAPES | SHARED)[job.shape])
    if job.moves:
        _let_move(pipe, suffering, job.by_stage)
    entries = _watched(suffering)
    suffering.at(START)
    life: Any = Life(pipe, place, suffering, full)
    if job.moves:
        life.calm = MOVED_STEPS
    if job.pauses:
        life.every = 1
    firsts: list[float] = []
    callbacks = [
        csv_log(f"{place}/log.csv"),
        suffering,
        Checkpoints(pipe, f"{place}/checkpoints", every=job.every),
        life,
        lambda _: firsts.append(time.perf_counter()),
    ]
    more: dict[str, Any] = {}
    if job.evaluates:
        more = {"held_out": [(x.double(), y) for x, y in jobs.batches(1)], "evaluate_every": job.evaluates}
    losses = pipe.fit(loader_of(), 2 * _MOST, callbacks=callbacks, **more)
    weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    found = Trained(losses, weights, num_sockets())
    if is_new and entries:
        found = found._replace(is_new=True, outside_s=entries[0] - began, meeting_s=firsts[0] - entries[0])
    return found


def _watched(suffering: Suffering) -> list[float]:
    """The times at which this process begins to meet another one that enters."""
    entries: list[float] = []
    original = Session.with_newcomer

    def with_newcomer(session: Session, entry: Any) -> Session:
        entries.append(time.perf_counter())
        suffering.at(ENTRY)
        return original(session, entry)

    mock.patch.object(Session, "with_newcomer", with_newcomer).start()
    return entries


def undisturbed(shape: str, steps: int, factor: float = 1.0) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses, and weights after each step, of the same training in this process; `factor` as in `pipeline_of`."""
    pipe = pipeline_of(factor, **(SHAPES | SHARED)[shape])
    weights: list[dict[str, Tensor]] = []

    class Keeping:
        every = 1

        def step(self, record: Record) -> None:
            weights.append({name: tensor.clone() for name, tensor in pipe.state_dict().items()})

    losses = pipe.fit(loader_of(), steps, callbacks=[Keeping()])
    return losses, weights


MOVED_STEPS = 60
"""Steps of a training whose layers, or shares of the batch, move after 16 steps, and again after 40."""


class Moving(Rebalancer):
    """Moves by the times of a clock of the trial: first the last ranks are slow, then the first ones."""

    suffering: Suffering
    by_stage = False

    def figures_of(self, passes: Any) -> list[Any]:
        self.suffering.at(LOOK)
        plan = self._pipe.plan
        is_late = self._pipe.num_updates > MOVED_STEPS // 2
        if self.by_stage:
            slow = set(plan.placement.ranks[0 if is_late else -1])
        else:
            slow = {0 if is_late else 1}
        each_s = 30.0 if self._pipe.rank in slow else 10.0
        seconds = []
        for stage, (spec, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
            if self._pipe.rank in ranks:
                seconds.append((stage, each_s * len(spec.layers)))
        *_, move_s = super().figures_of(passes)
        return [seconds, 0.0, 1000.0, move_s]

    def _make(self, move: Any) -> None:
        self.suffering.at(MOVE)
        super()._make(move)


def _let_move(pipe: Pipeline, suffering: Suffering, by_stage: bool) -> None:
    """Gives a pipeline the clock of the trial."""
    third = 10.0 / 3
    layers = tuple(Layer(f"layer {i}", third, third, third, 0, 0, 8) for i in range(len(pipe.layers)))
    moving = Moving(pipe, Decision(pipe.plan, Profile("model", 1, layers)))
    moving.suffering = suffering
    moving.by_stage = by_stage
    pipe.rebalancer = moving


def move(job: Job, place: str, full: int) -> Trained:
    """Trains in double precision while layers move; `full` is as in `grow`."""
    Path(place, f"{os.getpid()}.pid").write_text(os.environ.get(MEMORY, ""))
    suffering = Suffering(place, job.faults)
    pipe = pipeline_of(rebalance=True, **SHAPES[job.shape])
    _let_move(pipe, suffering, job.by_stage)
    suffering.at(START)
    began = time.perf_counter()
    saves = Checkpoints(pipe, f"{place}/checkpoints", every=job.every)
    callbacks = [csv_log(f"{place}/log.csv"), suffering, saves]
    losses = pipe.fit(loader_of(), MOVED_STEPS, callbacks=callbacks)
    seconds = time.perf_counter() - began
    weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return Trained(losses, weights, num_sockets(), seconds=seconds)
