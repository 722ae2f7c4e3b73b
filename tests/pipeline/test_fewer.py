"""The plan for the ranks that are left: where the layers were measured, the one that is predicted to be fastest."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipefit.errors import PipefitError
from pipefit.pipeline.fewer import fitting
from pipefit.pipeline.request import Decision, _predicted, _spelled_out, given_plan
from pipefit.planner import by_hand
from pipefit.profiling.workload import Workload
from pipefit.schedules import find, shape_of
from pipefit.spec import Layer, Profile, Topology
from pipefit.spec.options import Request
from pipefit.stage.split import named_layers
from pipefit.verify import verify


def _profile(seconds):
    """Layers that take so long per micro-batch of one sample, with backwards twice as long."""
    layers = (Layer(f"layer {i}", s, s, s, 8, 8, 8) for i, s in enumerate(seconds))
    return Profile("model", 1, tuple(layers))


def _left(seconds, left, measured=True, **options):
    """Stages and copies on the ranks that are left of a run whose layers take so many seconds."""
    plan = by_hand(len(seconds), schedule="1f1b", **{"num_microbatches": 8, **options})
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in seconds))
    work = Workload(named_layers(layers), nn.MSELoss(), None, torch.device("cpu"), (torch.zeros(8, 2), None), False)
    full = plan.num_processes
    session = SimpleNamespace(num_ranks=left, rank=1, is_distributed=True, start=SimpleNamespace(restart=1, full=full))
    before = Decision(plan, _profile(seconds), Topology.local(full)) if measured else None
    request = Request(plan=plan)

    def plan_of(other, count):
        return given_plan(other.plan) or _spelled_out(other, work, session, before and before.profile, count)

    found = plan_of(fitting(request, session, plan_of, _predicted(before, request, work)), left)
    verify(find(found.schedule)(shape_of(found))).raise_if_bad()
    return [len(stage.layers) for stage in found.partition.stages], [len(ranks) for ranks in found.placement.ranks]


TWO = {"num_ranks": 4, "replicas": (2, 2)}


def test_the_lighter_stage_loses_its_copy():
    """Three stages would be no faster: one layer takes most of the time."""
    assert _left([1.0, 3.0], 3, **TWO) == ([1, 1], [1, 2])
    assert _left([3.0, 1.0], 3, **TWO) == ([1, 1], [2, 1])
    assert _left([1.0, 4.0, 1.0], 3, stages=[1, 2], **TWO) == ([1, 2], [1, 2])


def test_one_copy_of_each_stage_is_taken_where_it_is_predicted_to_be_faster():
    assert _left([1.0] * 6, 3, **TWO) == ([2, 2, 2], [1, 1, 1])


def test_without_measured_layers_the_last_stage_loses_its_copy():
    assert _left([1.0] * 6, 3, measured=False, **TWO) == ([3, 3], [2, 1])


def test_a_lost_copy_of_the_pipeline_leaves_the_same_stages():
    assert _left([1.0, 1.0, 3.0, 1.0], 2, measured=False, stages=[1, 3], **TWO) == ([1, 3], [1, 1])


def test_a_plan_without_copies_gets_other_stages():
    assert _left([1.0, 1.0, 2.0], 2, num_ranks=3) == ([2, 1], [1, 1])


def test_what_no_plan_fits_is_refused_with_every_reason():
    with pytest.raises(PipefitError, match=r"no plan for the 3 of 2 processes that are left:\n  1f1b with one copy"):
        _left([1.0, 1.0], 3, num_ranks=2)
