"""The workers of a loader are no ranks: they start as in a plain script, and nothing of a rank is theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime import child_jobs

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import LaunchError, launch, run_script

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parent / "loader_script.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the script in one process."""
    place = tmp_path_factory.mktemp("alone")
    launch(run_script, 1, str(SCRIPT), [str(place)], quiet=True)
    return losses_of(place, 1)


def losses_of(place, num_ranks=2):
    found = [json.loads((place / f"losses-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(one == found[0] for one in found)
    return found[0]


def test_a_script_without_a_main_guard_trains_with_workers(tmp_path, alone):
    launch(run_script, 2, str(SCRIPT), [str(tmp_path)], quiet=True)
    assert losses_of(tmp_path) == alone


def test_it_is_recovered(tmp_path, alone):
    logs = tmp_path / "logs"
    launch(run_script, 2, str(SCRIPT), [str(tmp_path), "die"], folder=logs, quiet=True, recover=1)
    assert losses_of(tmp_path) == alone
    fault, recovery = noted(logs)
    assert "rank 1 failed" in fault["fault"] and "SIGKILL" in fault["fault"] and recovery["start"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [False, pytest.param(True, marks=pytest.mark.long)])
def test_it_trains_under_torchrun(tmp_path, alone, recovers):
    options = ["--standalone", "--nproc-per-node", "2", *(["--max-restarts", "1"] if recovers else [])]
    words = [str(SCRIPT), str(tmp_path), *(["die"] if recovers else [])]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *options, *words], env=environment, check=True)
    assert losses_of(tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_runs_the_script_again_does_not_join(tmp_path, method):
    with pytest.raises(LaunchError, match="worker"):
        launch(run_script, 2, str(SCRIPT), [str(tmp_path), method], folder=tmp_path / "logs", quiet=True)
    assert "has started this process, which is not a rank" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_child_that_is_terminated_does_not_stop_its_rank():
    assert launch(child_jobs.train_and_terminate_a_child, 2, quiet=True) == [(-15, 4, False)] * 2


def test_a_child_of_a_rank_makes_no_pipeline():
    for said in launch(child_jobs.pipeline_in_a_child, 2, quiet=True):
        assert "has started this process, which is not a rank" in said


def test_a_run_ends_although_a_child_of_a_rank_stays():
    launch(child_jobs.leave_a_child, 2, quiet=True)
