"""A rank with a loader that has workers, or one of these workers, is killed: the run resumes to the bit."""

import json
from pathlib import Path

import pytest

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch, run_script

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[1] / "runtime" / "loader_script.py"
DEATHS = [(who, rank, step) for who in ("die", "worker") for rank in (0, 1) for step in (1, 4, 6, 9)]


def losses_of(place: Path, num_ranks: int) -> list[list[float]]:
    return [json.loads((place / f"losses-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_runs_with_workers_of_loaders(trial, tmp_path: Path):
    launch(run_script, 1, str(SCRIPT), [str(tmp_path)], quiet=True)
    (undisturbed,) = losses_of(tmp_path, 1)
    for who, rank, step in DEATHS:
        place = tmp_path / f"{who}-{rank}-{step}"
        place.mkdir()
        words = [str(place), who, f"rank={rank}", f"step={step}"]
        launch(run_script, 2, str(SCRIPT), words, folder=place / "logs", quiet=True, recover=2)
        faults = [line["fault"] for line in noted(place / "logs") if "fault" in line]
        trial(
            "SIGKILL to a rank with workers" if who == "die" else "SIGKILL to a worker of a loader",
            f"{words}: {faults}",
            well=len(faults) == 1,
            named=all(f"rank {rank} failed" in fault for fault in faults),
            resumed=losses_of(place, 2) == [undisturbed] * 2,
        )
