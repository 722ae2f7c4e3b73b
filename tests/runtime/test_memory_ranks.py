"""Copies in the memory of machines: a run resumes from those of the machines that are left."""

import shutil

import pytest
import torch
from tests.runtime import recovery_jobs

from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist

COPIES = {"replicas": 2, "microbatches": 4}


def _machines(tmp_path, count):
    folders = [tmp_path / f"machine-{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


def _resumed(folders, ranks, options):
    first, *others = launch(recovery_jobs.recall_on_machines, ranks, folders, options, quiet=True)
    assert all(other[:2] == first[:2] for other in others)
    return first


def _as_trained(resumed, options, exactly=True):
    step, losses, state = resumed
    expected, weights, _ = recovery_jobs.train("", options, None)
    assert step == 4
    if exactly:
        assert losses == expected[4:]
        assert all(torch.equal(state[name], weights[name]) for name in weights)
    else:
        assert losses == pytest.approx(expected[4:], rel=1e-5)


def test_the_copies_of_the_machine_that_is_left_are_enough(tmp_path):
    folders = _machines(tmp_path, 2)
    launch(recovery_jobs.train_on_machines, 4, folders, COPIES, quiet=True)
    _as_trained(_resumed(folders[1:], 2, {"microbatches": 4}), COPIES, exactly=False)


def test_a_machine_that_is_replaced_gets_all_from_the_others(tmp_path):
    folders = _machines(tmp_path, 2)
    launch(recovery_jobs.train_on_machines, 4, folders, COPIES, quiet=True)
    shutil.rmtree(folders[0])
    (tmp_path / "machine-0").mkdir()
    _as_trained(_resumed(folders, 4, COPIES), COPIES)


def test_machines_send_each_other_the_stages_that_they_lack(tmp_path):
    """Machine 0 held stage 0, and takes stage 1."""
    folders = _machines(tmp_path, 2)
    launch(recovery_jobs.train_on_machines, 2, folders, {}, quiet=True)
    _as_trained(_resumed(folders[::-1], 2, {}), {})


def test_a_sharded_optimizer_is_kept_whole(tmp_path):
    folders = _machines(tmp_path, 1)
    options = COPIES | {"shard": "optimizer"}
    launch(recovery_jobs.train_on_machines, 4, folders, options, quiet=True)
    _as_trained(_resumed(folders, 4, options), options)


def test_a_copy_of_processes_that_share_layers_is_whole(tmp_path):
    """The second one once removed the file that the first one was writing."""
    assert launch(recovery_jobs.copy_in_pairs, 2, str(tmp_path), quiet=True) == [1, 1]


def test_a_step_that_no_machine_holds_whole_is_not_taken(tmp_path):
    folders = _machines(tmp_path, 2)
    launch(recovery_jobs.train_on_machines, 2, folders, {}, quiet=True)
    assert _resumed(folders[1:], 2, {})[0] is None


def test_a_damaged_copy_is_not_taken(tmp_path):
    """The newest step of one machine: both resume from the step before."""
    folders = _machines(tmp_path, 2)
    launch(recovery_jobs.train_on_machines, 2, folders, {}, quiet=True)
    path = tmp_path / "machine-1" / "training-1" / "step-000004" / "rank-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert _resumed(folders, 2, {})[0] == 3
