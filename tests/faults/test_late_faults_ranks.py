"""Faults at random moments while a run grows again, or layers move: it ends, with the numbers of an undisturbed run."""

import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.dying_jobs import RANKS, SHAPES, SHARED
from tests.faults.grown_jobs import steps_in
from tests.faults.late_jobs import (
    ENTRY,
    FEWER,
    LOOK,
    MOVE,
    START,
    Fault,
    Job,
    Trained,
    grow,
    move,
    undisturbed,
)
from tests.faults.shapes import descriptors, left_by
from torch import Tensor

from pipefit.runtime.faults import IN_PLACE, noted
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]

ALL = os.environ.get("PIPEFIT_TRIALS") == "all"
GROWTHS = 132 if ALL else 2 * len(SHAPES)
OF_SHARED = 8 if ALL else 1
"""Growths of each shape whose copies share something."""

GROWTHS_OF_MOVED = 44 if ALL else len(SHAPES)
"""Those in which layers move, too."""

MOVES = 66 if ALL else len(SHAPES)
SIGNALS = (*[signal.SIGKILL] * 4, signal.SIGSTOP)
USUAL: dict[str, Any] = {"threads": 1, "quiet": True, "recover": 4, "deadline_s": 6}


class Whole:
    """An undisturbed training in this process, as long as the longest one so far."""

    def __init__(self, shape: str) -> None:
        self._shape = shape
        self._losses: list[float] = []
        self._weights: list[dict[str, Tensor]] = []

    def unlike(self, found: Trained) -> list[str]:
        """The losses and the weights of a training that are others, apart from rounding."""
        steps = len(found.losses)
        if steps > len(self._losses):
            self._losses, self._weights = undisturbed(self._shape, 2 * steps)
        unlike = []
        for step, (loss, expected) in enumerate(zip(found.losses, self._losses, strict=False), 1):
            if loss != pytest.approx(expected, rel=1e-9):
                unlike.append(f"loss {loss} for {expected} in step {step}")
        for name, expected in self._weights[steps - 1].items():
            if not torch.allclose(found.weights[name], expected, rtol=1e-9, atol=1e-12):
                unlike.append(f"{name} after step {steps}")
        return unlike


class Trials:
    """The trials of a shape, one after the other.

    Args:
        shape: see `SHAPES` and `SHARED`.
        place: a folder for their files.
        train: a function of `late_jobs`.
        options: of the launch.
    """

    def __init__(self, shape: str, place: Path, train: Callable[..., Trained], **options: Any) -> None:
        self._shape = shape
        self._place = place
        self._train = train
        self._options = USUAL | options
        self._whole = Whole(shape)
        self._most_sockets = 10_000
        self._before = 10_000

    def plain(self, faults: Sequence[Fault] = ()) -> list[Trained]:
        """A training that shows how long its phases take, and what it leaves open."""
        found, _ = self._run(Job(self._shape, list(faults)), "plain")
        self._most_sockets = max(one.sockets for one in found)
        self._before = descriptors()
        return found

    def wrong(self, name: str, job: Job) -> tuple[str, list[str], list[str]]:
        """How a trial ended, what did not end well, and the numbers that are wrong."""
        found, folder = self._run(job, name)
        lines = noted(folder)
        faults = [line["fault"] for line in lines if "fault" in line]
        steps = steps_in(folder.parent / "log.csv")
        wrong = [f"{one} is left" for one in left_by(folder.parent)]
        if max(one.sockets for one in found) > self._most_sockets or descriptors() > self._before:
            wrong.append("connections or files are left open")
        if steps != list(range(1, len(found[0].losses) + 1)):
            wrong.append(f"the log has the steps {steps}")
        if len(faults) > len(job.faults):
            wrong.append(f"more faults than were tried: {faults}")
        unlike = [text for one in found for text in self._whole.unlike(one)]
        shutil.rmtree(folder.parent)
        return self._ending(found, lines), wrong, unlike

    def _run(self, job: Job, name: str) -> tuple[list[Trained], Path]:
        folder = self._place / name
        folder.mkdir()
        full = RANKS[self._shape]
        found = launch(self._train, full, job, str(folder), full, folder=folder / "logs", **self._options)
        return [one for one in found if one is not None], folder / "logs"

    def _ending(self, found: list[Trained], lines: list[dict[str, Any]]) -> str:
        if not any("fault" in line for line in lines):
            return "nobody was lost"
        if any(line.get("source", IN_PLACE) != IN_PLACE for line in lines):
            return "all started again"
        if len(found) < RANKS[self._shape]:
            return "the others went on"
        return "all are there again"


def growth(number: int, shape: str, outside_s: float, meeting_s: float) -> Job:
    """A rank that is lost, and up to two more faults, at moments within the phases of the growth that follows."""
    dice = random.Random(number)
    homes = dice.sample(range(RANKS[shape]), RANKS[shape])
    faults = [Fault(homes[0], False, START, dice.uniform(0, 0.3), dice.choice(SIGNALS))]
    for _ in range(dice.choice((0, 1, 1, 1, 2))):
        is_new = dice.random() < 0.5
        home = homes[0]
        anchor = START
        if not is_new:
            home = dice.choice(homes[1:])
            anchor = FEWER
        most_s = 1.2 * outside_s
        if dice.random() < 0.5:
            anchor = ENTRY
            most_s = 2 * meeting_s
        faults.append(Fault(home, is_new, anchor, dice.uniform(0, most_s), dice.choice(SIGNALS)))
    return Job(shape, faults, dice.choice((1, 2, 5)), dice.random() < 0.5, dice.choice((0, 3)))


def loss_of_a_move(number: int, shape: str, seconds: float) -> Job:
    """One rank that is lost, or two, at any time or when layers move."""
    dice = random.Random(1000 + number)
    faults = []
    for home in dice.sample(range(RANKS[shape]), dice.choice((1, 1, 2))):
        anchor, most_s = dice.choice(((START, seconds), (LOOK, 0.01), (MOVE, 0.01), (MOVE, 0.1)))
        faults.append(Fault(home, False, anchor, dice.uniform(0, most_s), dice.choice(SIGNALS)))
    return Job(shape, faults, dice.choice((1, 2, 5)), by_stage=dice.random() < 0.5)


def growth_of_shared(number: int, shape: str, outside_s: float, meeting_s: float) -> Job:
    """A rank that is lost after a step, which is then in memory, and up to two more faults."""
    job = growth(number, shape, outside_s, meeting_s)
    first = job.faults[0]._replace(anchor=f"step {random.Random(number).randint(1, 3)}")
    return job._replace(faults=[first, *job.faults[1:]])


def growth_of_moved(number: int, shape: str, outside_s: float, meeting_s: float) -> Job:
    """A rank that is lost after layers have moved, or while they do, and up to two more faults."""
    job = growth(3000 + number, shape, outside_s, meeting_s)
    dice = random.Random(3000 + number)
    anchor = dice.choice((LOOK, MOVE, f"step {dice.randint(1, 40)}"))
    first = job.faults[0]._replace(anchor=anchor, seconds=dice.uniform(0, 0.05))
    return job._replace(faults=[first, *job.faults[1:]], by_stage=dice.random() < 0.5, moves=True)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that is captured holds on to its error, and to the processes of the start that failed."""
    monkeypatch.setattr(logging.getLogger("pipefit.launch"), "disabled", True)


def report(trial: Any, kind: str, trials: Trials, number: int, job: Any) -> None:
    """Makes a trial and reports its outcome."""
    ending, wrong, unlike = trials.wrong(str(number), job)
    what = f"trial {number}: {job}: {wrong}, {unlike}"
    trial(f"{kind}, {ending}", what, well=not wrong, resumed=not unlike)


def numbers(shape: str, most: int) -> range:
    """The seeds of a shape's trials."""
    if shape in SHARED:
        return range(2000, 2000 + OF_SHARED)
    return range(list(SHAPES).index(shape), most, len(SHAPES))


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("shape", [*SHAPES, *SHARED])
def test_a_run_that_grows_survives_faults_at_random_moments(shape: str, trial, tmp_path: Path) -> None:
    trials = Trials(shape, tmp_path, grow, grow=True)
    (new,) = [one for one in trials.plain([Fault(1, False, "step 2", 0.0)]) if one.is_new]
    make = growth_of_shared if shape in SHARED else growth
    for number in numbers(shape, GROWTHS):
        job = make(number, shape, new.outside_s, new.meeting_s)
        kind = "faults while copies that share grow" if shape in SHARED else "faults while a run grows"
        report(trial, kind, trials, number, job)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_that_grows_while_layers_move_survives_faults(shape: str, trial, tmp_path: Path) -> None:
    trials = Trials(shape, tmp_path, grow, grow=True)
    (new,) = [one for one in trials.plain([Fault(1, False, "step 2", 0.0)]) if one.is_new]
    for number in numbers(shape, GROWTHS_OF_MOVED):
        job = growth_of_moved(number, shape, new.outside_s, new.meeting_s)
        report(trial, "faults while a run grows and layers move", trials, number, job)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_whose_layers_move_survives_losses_at_random_moments(shape: str, trial, tmp_path: Path) -> None:
    trials = Trials(shape, tmp_path, move)
    seconds = max(one.seconds for one in trials.plain())
    for number in numbers(shape, MOVES):
        job = loss_of_a_move(number, shape, seconds)
        report(trial, "losses while layers move", trials, number, job)


@pytest.mark.usefixtures("quiet")
def test_some_of_these_trials_end_well(tmp_path: Path) -> None:
    """A loss between a step and the look at its times once ended the run."""
    growths = Trials("1f1b", tmp_path, grow, grow=True)
    moves = Trials("1f1b", tmp_path, move)
    for name, trials, faults in (
        ("a death as another process enters", growths, [Fault(0, False, "step 2", 0.0), Fault(2, False, ENTRY, 0.02)]),
        ("a death before the process enters", growths, [Fault(1, False, "step 2", 0.0), Fault(1, True, START, 0.01)]),
        ("a death before a look, and a move", moves, [Fault(2, False, "step 16", 0.0), Fault(1, False, MOVE, 0.0)]),
    ):
        ending, wrong, unlike = trials.wrong(name, Job("1f1b", faults))
        assert ending != "nobody was lost" and not wrong and not unlike


def test_rounding_stays_small_in_these_trainings() -> None:
    """A trial may take hundreds of steps, and the plans of fewer ranks sum in another order."""
    whole = Whole("1f1b")
    losses, weights = undisturbed("1f1b", 150, factor=1 + 4e-16)
    assert not whole.unlike(Trained(losses, weights[-1], 0))
    assert whole.unlike(Trained(losses, weights[-2], 0))
    assert whole.unlike(Trained(losses[1:], weights[-1], 0))
