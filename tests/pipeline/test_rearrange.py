"""A training that goes on by another plan has the numbers of one that stays."""

import pytest
import torch
from tests.pipeline import rearranging_jobs as jobs
from tests.testing.equality_models import MODELS

from pipefit.runtime.launch import launch

ONE = [jobs.plan_of([8], 1)] * 2


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, rtol=1e-11, atol=1e-14), name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_goes_on_by_other_cuts_copies_and_schedules(name):
    plans = [
        jobs.plan_of([3, 5], 2),
        jobs.plan_of([4, 1, 3], 3, "gpipe"),
        jobs.plan_of([1, 2, 2, 3], 2, "interleaved", num_chunks=2),
        jobs.plan_of([5, 3], 4, replicas=(2,)),
        jobs.plan_of([5, 3], 3, replicas=(1, 2)),
        jobs.plan_of([8], 1),
    ]
    assert_same(jobs.trained(name, plans), jobs.trained(name, ONE[:1] * len(plans)))


LEAVING = [("dropout", 3, [[0, 2], [1]]), ("attention, batch norm and dropout", 0, [[1], [0, 2]])]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "gone", "ranks"), LEAVING)
def test_a_process_leaves_and_the_copies_of_its_stage_go_on(name, gone, ranks, tmp_path):
    place = str(tmp_path / "store")
    found = launch(jobs.lose_a_copy, 4, name, gone, ranks, place, threads=1, quiet=True, deadline_s=60)
    assert found.pop(gone) is None
    for trained, moved, same in found:
        assert_same(trained, jobs.trained(name, ONE))
        assert moved == (0, 0.0)
        assert same == [True, True]
