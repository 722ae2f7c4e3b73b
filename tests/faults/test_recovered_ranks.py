"""Runs that lose ranks twice, at once, or while they recover: every one resumes, to the bit."""

from pathlib import Path

import pytest
from tests.faults.recovered_jobs import LOADING, RANKS, SHAPES, Death, train

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch
from pipefit.runtime.repairs import REPAIR

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]

SYNCHRONOUS_PASS = 4
"""In the fourth pass of a start a checkpoint is there; `pipedream` runs several steps in a pass."""


def losses_of(shape: str) -> dict[str, list[Death]]:
    """Which ranks are lost, and when."""
    late = 2 if shape == "pipedream" else SYNCHRONOUS_PASS
    last = RANKS[shape] - 1
    return {
        "two deaths, one after the other": [Death(0, last, "bwd", late), Death(1, 0, "fwd")],
        "two ranks at once": [Death(0, 0, "fwd", late), Death(0, last, "fwd", late)],
        "a death while the run recovers": [Death(0, 0, "step", late), Death(1, last, LOADING)],
        "three deaths": [Death(0, 0, "bwd", 1), Death(1, last, "step", late), Death(2, 0, "load", 1)],
    }


def op_of(shape: str, death: Death) -> Death:
    """The same death where a program has no whole backwards."""
    return death._replace(op="bwd_input") if shape == "zb-v" and death.op == "bwd" else death


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_survives_several_deaths(shape: str, trial, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(REPAIR, "0")
    undisturbed = launch(train, RANKS[shape], shape, str(tmp_path / "whole"), [], quiet=True)
    for number, (fault, deaths) in enumerate(losses_of(shape).items()):
        folder = tmp_path / str(number)
        deaths = [op_of(shape, death) for death in deaths]
        place, logs = str(folder / "checkpoints"), folder / "logs"
        found = launch(train, RANKS[shape], shape, place, deaths, folder=logs, quiet=True, recover=3)
        faults = [line["fault"] for line in noted(logs) if "fault" in line]
        starts = {death.start for death in deaths}
        named = all(
            any(f"rank {death.rank} " in fault and "SIGKILL" in fault for death in deaths if death.start == start)
            for start, fault in enumerate(faults)
        )
        # Copies in memory need no file, so nothing is lost while one is read.
        expected = len(starts) if len(faults) >= len(starts) or LOADING not in {one.op for one in deaths} else 1
        trial(
            f"{fault}, {shape}",
            f"{deaths}: {faults}",
            well=len(faults) == expected,
            named=named,
            resumed=all(one == undisturbed[0] for one in found),
        )
