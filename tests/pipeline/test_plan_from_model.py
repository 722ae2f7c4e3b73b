"""`pipefit.plan`: a model in, a plan out that trains."""

import msgspec
import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.errors import PlanError

pytestmark = pytest.mark.slow


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_a_planned_model_trains_as_the_plan_says():
    x = torch.randn(8, 16)
    model = make()
    planned = pf.plan(model, example=(x, x), topology="local:2", loss=nn.MSELoss(), num_microbatches=(2, 4), depths=[2])
    pipe = pf.Pipeline(model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), plan=planned)
    assert pipe.plan == planned.plan and pipe.plan.placement.num_ranks == 2
    assert 8 % pipe.plan.num_microbatches == 0
    first = pipe.step(x, x)
    assert pipe.step(x, x) < first
    assert "predicted:" in str(planned) and "slower: share of the winner" in planned.explain()


@pytest.mark.parametrize("count", [3, 4])
def test_the_search_for_a_schedule_obeys_a_number_of_microbatches(count):
    x = torch.randn(16, 16)
    pipe = pf.Pipeline(
        make(),
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        schedule="auto",
        microbatches=count,
        example=(x, x),
        parallelism=pf.Parallelism(ranks=2),
    )
    assert pipe.plan.num_microbatches == count
    assert pipe.step(x, x) > 0


def test_counts_that_do_not_divide_the_batch_are_refused():
    x = torch.randn(9, 16)
    with pytest.raises(PlanError, match="none of \\[2, 4\\] divides the batch of 9"):
        pf.plan(make(), example=(x, x), topology="local:2", num_microbatches=(2, 4))


def test_a_profile_or_its_name_needs_no_example_and_sweeps_like_the_command_line():
    planned = pf.plan("vgg16", topology="pcie-4", global_batch=1024, depths=[2])
    assert planned.plan == msgspec.structs.replace(
        pf.plan(planned.profile, topology=planned.topology, global_batch=1024, depths=[2]).plan,
        plan_seconds=planned.plan.plan_seconds,
    )
    found = planned.sweep(schedule=["gpipe", "1f1b"])
    assert [cell.plan.schedule for cell in found.cells] == ["gpipe", "1f1b"]
    assert "schedule gpipe" in str(found) and "--all" not in planned.explain(width=60, every=True)
    with pytest.raises(PlanError, match="example"):
        pf.plan(make(), topology="local:2")
