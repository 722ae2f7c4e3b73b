"""A run whose ranks die or hang resumes, with the numbers of a run that was never disturbed."""

from pathlib import Path

import pytest
import torch
from tests.faults import recovered_jobs
from tests.faults.repaired_jobs import steps_in
from tests.runtime import jobs, recovery_jobs

from pipefit.ir.op import Op
from pipefit.runtime.faults import noted
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.repairs import REPAIR
from pipefit.spec.options import Spilled

pytestmark = pytest.mark.dist


def _first(program, rank, op):
    return next(index for index, i in enumerate(program.ranks[rank]) if i.op is op)


def _same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.fixture(scope="module")
def undisturbed():
    return recovery_jobs.train("", {}, None)


def test_a_killed_rank_is_started_again_and_the_run_resumes_from_the_newest_checkpoint(tmp_path, undisturbed):
    at = _first(jobs.pipeline().program, 1, Op.BWD)
    place, logs = str(tmp_path / "checkpoints"), tmp_path / "logs"
    results = launch(recovery_jobs.train, 2, place, {}, ("kill", 1, at, 6), folder=logs, quiet=True, recover=1)
    for found in results:
        _same(found, undisturbed)
    fault, recovery = noted(logs)
    assert "rank 1 failed at" in fault["fault"] and "SIGKILL" in fault["fault"]
    # The first `fit` has saved its last step; the second one was in its second step.
    assert (recovery["resumed"], recovery["ranks"], recovery["start"]) == (4, 2, 1)
    assert recovery["lost"] in (0, 1) and recovery["seconds"] > 0 and recovery["source"].endswith("step-000004")


def test_a_rank_killed_while_a_thread_writes_leaves_the_checkpoint_before(tmp_path, undisturbed):
    place, logs = tmp_path / "checkpoints", tmp_path / "logs"
    for found in launch(recovery_jobs.train_and_die_while_saving, 2, str(place), folder=logs, quiet=True, recover=1):
        _same(found, undisturbed)
    assert noted(logs)[1]["resumed"] == 4
    assert not list(place.glob(".tmp-*"))


def test_a_rank_that_hangs_is_found_and_started_again(tmp_path, undisturbed):
    at = _first(jobs.pipeline().program, 0, Op.FWD)
    place, logs = str(tmp_path / "checkpoints"), tmp_path / "logs"
    settings = {"folder": logs, "quiet": True, "recover": 1, "deadline_s": 1.5}
    for found in launch(recovery_jobs.train, 2, place, {}, ("stop", 0, at, 5), **settings):
        _same(found, undisturbed)
    fault, recovery = noted(logs)
    assert "the run hung: rank 0 is stopped" in fault["fault"] and recovery["resumed"] == 4


def test_a_run_without_a_checkpoint_begins_again(undisturbed):
    at = _first(jobs.pipeline().program, 0, Op.STEP)
    for found in launch(recovery_jobs.train, 2, "", {}, ("kill", 0, at, 2), quiet=True, recover=1):
        _same(found, undisturbed)


def test_more_faults_than_recoveries_end_the_run(tmp_path):
    with pytest.raises(LaunchError, match="SIGKILL"):
        launch(recovery_jobs.always_die, 2, quiet=True, recover=1, folder=tmp_path)
    assert [line["start"] for line in noted(tmp_path) if "fault" in line] == [0, 1]


def test_an_error_before_the_first_step_ends_the_run_at_once(tmp_path):
    with pytest.raises(LaunchError, match="no such thing"):
        launch(recovery_jobs.always_raise, 2, quiet=True, recover=3, folder=tmp_path)
    assert len(noted(tmp_path)) == 1


def test_a_run_that_is_started_again_measures_nothing_and_has_the_same_plan():
    found = launch(recovery_jobs.train_by_measured_plan, 2, ("kill", 1, 0, 2), quiet=True, recover=1)
    assert found[0] == found[1]


def test_checkpoints_of_an_earlier_run_are_not_taken(tmp_path, undisturbed):
    """A run of nine steps was there before, with other weights."""
    place = str(tmp_path)
    launch(recovery_jobs.train, 2, place, {"seed": 5}, None, 18, quiet=True)
    at = _first(jobs.pipeline().program, 0, Op.STEP)
    for found in launch(recovery_jobs.train, 2, place, {}, ("kill", 0, at, 6), quiet=True, recover=1):
        _same(found, undisturbed)


@pytest.mark.parametrize("kind", ["pipedream", "spilled to the host", "spilled to a disk"])
def test_what_has_no_copies_in_memory_resumes_from_the_newest_checkpoint(kind, tmp_path):
    def options(name):
        if kind == "pipedream":
            return {"schedule": "pipedream", "scheduler": None}
        return {"spill": Spilled(disk=tmp_path / name if "disk" in kind else None)}

    expected = recovery_jobs.train(str(tmp_path / "plain"), options("plain-tier"), None)
    place, logs = str(tmp_path / "checkpoints"), tmp_path / "logs"
    # The third pass of pipedream is of the second `fit`.
    fault = ("kill", 1, 2, 3 if kind == "pipedream" else 6)
    for found in launch(recovery_jobs.train, 2, place, options("tier"), fault, folder=logs, quiet=True, recover=1):
        _same(found, expected)
    recovery = noted(logs)[1]
    assert recovery["resumed"] == 4 and recovery["source"].endswith("step-000004")


# ---- copies in memory ------------------------------------------------------------------------------------------------

COPIES = {"replicas": 2, "microbatches": 4}


@pytest.mark.parametrize("rank", [0, 3])
def test_with_copies_of_the_pipeline_no_step_is_lost_and_no_disk_is_read(rank, tmp_path, monkeypatch):
    monkeypatch.setenv(REPAIR, "0")
    expected = recovery_jobs.train("", COPIES, None)
    at = _first(jobs.pipeline(**COPIES).program, rank, Op.BWD)
    settings = {"folder": tmp_path, "quiet": True, "recover": 1}
    for found in launch(recovery_jobs.train, 4, "", COPIES, ("kill", rank, at, 7), **settings):
        _same(found, expected)
    recovery = noted(tmp_path)[1]
    assert (recovery["resumed"], recovery["source"], recovery["lost"]) == (6, "memory", 0)


def test_no_log_lacks_the_step_after_which_a_run_resumes(tmp_path):
    """A copy in memory was once made before the log of a user was called."""
    launch(recovery_jobs.train_and_die_before_the_log, 2, str(tmp_path), folder=tmp_path, quiet=True, recover=1)
    assert steps_in(tmp_path / "log.csv") == ["1", "2", "3", "4", "5"]
    recovery = noted(tmp_path)[1]
    assert (recovery["resumed"], recovery["source"]) == (2, "memory")


def test_the_memory_is_free_again_after_the_run(tmp_path):
    (folder,) = launch(jobs.environment, 1, "PIPEFIT_MEMORY", quiet=True, recover=1)
    assert folder[1] and not Path(folder[1]).exists()


# ---- ranks that cannot be started again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "plan", "resumed"),
    [
        (3, {"stages": [2, 2, 2]}, ([3, 3], [1, 1]), 4),
        (4, {"stages": [2, 4], "replicas": 2, "microbatches": 4}, ([2, 4], [2, 1]), 5),
        (3, {"schedule": "interleaved", "chunks": 2, "microbatches": 3}, ([1, 2, 1, 2], [1, 1, 1, 1]), 4),
        (3, {"schedule": "interleaved", "stages": [1] * 6, "chunks": 2, "microbatches": 3}, ([1, 2, 1, 2], [1] * 4), 4),
    ],
)
def test_a_run_that_has_lost_a_rank_for_good_is_planned_anew(ranks, options, plan, resumed, tmp_path, monkeypatch):
    monkeypatch.setenv(REPAIR, "0")
    expected = recovery_jobs.train("", options, None)
    place = str(tmp_path / "checkpoints")
    settings = {"folder": tmp_path, "quiet": True, "recover": 2, "min_ranks": ranks - 1}
    results = launch(recovery_jobs.train_without_rank, ranks, place, options, ranks - 1, **settings)
    assert len(results) == ranks - 1
    for losses, state, layout in results:
        assert layout == plan
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert all(torch.allclose(state[name], expected[1][name], rtol=1e-4, atol=1e-6) for name in state)
    recovery = noted(tmp_path)[-1]
    assert (recovery["resumed"], recovery["ranks"], recovery["start"]) == (resumed, ranks - 1, 2)


def test_a_rank_that_cannot_be_started_again_ends_a_run_that_needs_all(tmp_path):
    with pytest.raises(LaunchError, match="rank 1 failed before its first instruction"):
        launch(recovery_jobs.train_without_rank, 2, "", {}, 1, folder=tmp_path, quiet=True, recover=2)


def test_a_tensor_parallel_run_that_loses_a_process_inside_its_layers_is_recovered(tmp_path):
    """The other process of the rank finds its peer gone in the middle of a layer."""
    undisturbed = launch(recovered_jobs.train, 2, "tensor", str(tmp_path / "whole"), [], quiet=True)
    death, logs = recovered_jobs.Death(0, 1, "fwd", 4), tmp_path / "logs"
    options = {"folder": logs, "quiet": True, "recover": 1}
    assert launch(recovered_jobs.train, 2, "tensor", str(tmp_path / "run"), [death], **options) == undisturbed
    assert "rank 1 failed" in noted(logs)[0]["fault"] and "SIGKILL" in noted(logs)[0]["fault"]
