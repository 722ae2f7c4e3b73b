"""Ranks with a GPU each and NCCL's rules lose others and go on in the same processes."""

import pytest
from tests.faults.grown_jobs import MOVED
from tests.faults.repaired_jobs import COPIES, Fault
from tests.faults.test_grown_ranks import test_lost_ranks_come_back_while_the_others_train as come_back
from tests.faults.test_repaired_ranks import is_same
from tests.sham.rank_jobs import repaired

from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize("shape", ["1f1b", MOVED])
def test_lost_ranks_come_back_while_the_others_train(tmp_path, caplog, shape):
    come_back(tmp_path, caplog, shape)


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        # At the commit point; then the other copy, whose stage comes from the memory of the machine.
        (COPIES, [Fault(0, "barrier", 2), Fault(2, "fwd", 4)]),
        (COPIES, [Fault(3, "bwd", 2), Fault(2, "step", 4)]),
        (COPIES | {"shard": "weights"}, [Fault(1, "bwd", 2), Fault(2, "fwd", 4)]),
    ],
    ids=["barrier, forward", "backward, step", "shared weights"],
)
def test_the_ranks_that_are_left_go_on_with_their_gpus(options, faults, tmp_path, caplog) -> None:
    place = tmp_path / "whole"
    place.mkdir()
    expected = repaired(str(place), COPIES, [])
    settings = {"folder": tmp_path / "logs", "quiet": True, "recover": 2, "deadline_s": 60}
    found = launch(repaired, 4, str(tmp_path), options, faults, **settings)
    assert len(found) == 2 and all(is_same(one, expected) for one in found)
    # No process was started in addition to the first four.
    assert len([path for path in tmp_path.iterdir() if path.name.isdecimal()]) == 4
    assert "repair 2 of 2: 2 ranks go on" in caplog.text
