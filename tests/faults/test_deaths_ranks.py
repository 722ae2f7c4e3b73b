"""Ranks that die at random moments, in trainings with copies: the run ends, with the numbers of an undisturbed one."""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tests.faults.dying_jobs import RANKS, SHAPES, SHARED, TENSOR, Death, Trained, train
from tests.faults.shapes import descriptors, left_by

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(3600)]

IS_ALL = os.environ.get("PIPEFIT_TRIALS") == "all"
TRIALS = 200 if IS_ALL else 2 * len(SHAPES)
OF_SHARED = 25 if IS_ALL else 1
"""Trials of each shape where ranks share something; in the first one the rank dies at an instruction."""

FIRST_SHARED = 1010


def deaths_of(number: int, whole: list[Trained]) -> list[Death]:
    """One death, or those of two ranks: at an instruction, which is the same in every run, or by a clock."""
    dice = random.Random(number)
    found = []
    for rank in dice.sample(range(len(whole)), dice.choice((1, 1, 1, 2))):
        if dice.random() < 0.5:
            found.append(Death(rank, dice.randint(1, whole[rank].instructions)))
        else:
            found.append(Death(rank, seconds=dice.uniform(0, whole[rank].seconds)))
    return found


def run(shape: str, folder: Path, deaths: list[Death]) -> list[Trained]:
    folder.mkdir()
    found = launch(
        train, RANKS[shape], shape, str(folder), deaths, folder=folder / "logs", threads=1, quiet=True, recover=2
    )
    return [one for one in found if one is not None]


def ending(shape: str, found: list[Trained], faults: list[str]) -> str:
    """The last thing that a death led to; a moment that comes after the end of the run leads to nothing."""
    if not faults:
        return "nobody died"
    if len(found) < RANKS[shape]:
        return "repaired in place"
    return "all started again"


def is_equal(found: Trained, whole: Trained) -> bool:
    """Whether losses and weights are the same within rounding: sums over other copies have another order."""
    if found.losses != pytest.approx(whole.losses, rel=1e-9) or found.weights.keys() != whole.weights.keys():
        return False
    return all(torch.allclose(found.weights[name], value, rtol=1e-9) for name, value in whole.weights.items())


def test_a_rank_that_does_not_come_to_a_new_group_is_not_waited_for(trial, tmp_path: Path) -> None:
    """The others wait for its address, which ends at once, or for its connection: then all are started again."""
    whole = run("data-parallel", tmp_path / "whole", [])
    found = run("data-parallel", tmp_path / "lost", [Death(2, in_group=True)])
    sources = [line["source"] for line in noted(tmp_path / "lost/logs") if "resumed" in line]
    same = all(is_equal(one, whole[0]) for one in found)
    trial(
        "a death before a new group",
        sources,
        well=len(sources) == 1 and not left_by(tmp_path / "lost"),
        resumed=same,
    )


def numbers_of(shape: str) -> range:
    """The numbers of the trials of a shape, which choose their deaths."""
    if shape not in SHAPES:
        return range(FIRST_SHARED, FIRST_SHARED + OF_SHARED)
    return range(list(SHAPES).index(shape), TRIALS, len(SHAPES))


@pytest.mark.parametrize("shape", [*SHAPES, *SHARED, *TENSOR])
def test_a_run_with_copies_survives_deaths_at_random_moments(shape: str, trial, tmp_path: Path, monkeypatch) -> None:
    # A warning that is captured holds on to its error, and to the processes of the start that failed.
    monkeypatch.setattr(logging.getLogger("pipefit.launch"), "disabled", True)
    whole = run(shape, tmp_path / "whole", [])
    most_sockets = max(one.sockets for one in whole)
    before = descriptors()
    num_deaths = 0
    for number in numbers_of(shape):
        deaths = deaths_of(number, whole)
        folder = tmp_path / str(number)
        found = run(shape, folder, deaths)
        faults = [line["fault"] for line in noted(folder / "logs") if "fault" in line]
        left = left_by(folder)
        sockets = max(one.sockets for one in found) - most_sockets
        files = descriptors() - before
        named = None
        if faults:
            named = any(f"rank {death.rank} " in faults[0] and "SIGKILL" in faults[0] for death in deaths)
        num_deaths += len(faults)
        trial(
            f"deaths at random moments, {ending(shape, found, faults)}",
            f"{shape}, trial {number}: {deaths}: {faults}; left {left}; {sockets} more sockets, {files} more files",
            well=len(faults) <= len(deaths) and not left and sockets <= 0 and files <= 0,
            named=named,
            resumed=all(is_equal(one, whole[0]) for one in found),
        )
        shutil.rmtree(folder)
    assert num_deaths, "nobody died: nothing has been shown"
