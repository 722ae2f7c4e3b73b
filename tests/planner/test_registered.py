"""Schedules of a user's own: the planner knows nothing of them but their programs."""

from collections.abc import Iterator

import pytest
from tests.planner.cases import model

from pipefit.cost import FREE, of_plan
from pipefit.ir import bwd, fwd
from pipefit.planner import plan
from pipefit.schedules import Task, program_of, schedule
from pipefit.schedules.registry import REGISTRY
from pipefit.simulate import simulate
from pipefit.spec import Level, Topology

MACHINE = Topology((Level("machine", 4, 5e9, 1e-5),))


def one_at_a_time(task: Task) -> Iterator[list]:
    """One micro-batch at a time, as naive model parallelism."""
    for stage, mbs in task.one_stage_each():
        yield [op(stage, mb) for mb in mbs for op in (fwd, bwd)]


def all_forwards_first(task: Task) -> Iterator[list]:
    """GPipe's order."""
    for stage, mbs in task.one_stage_each():
        yield [fwd(stage, mb) for mb in mbs] + [bwd(stage, mb) for mb in reversed(mbs)]


def early_first_rank(task: Task) -> Iterator[list]:
    """The first rank runs all forwards at once, the others have 1F1B's order."""
    for stage, mbs in task.one_stage_each():
        warmup = min(task.num_ranks - 1 - stage, len(mbs)) if stage else len(mbs)
        steady = [
            i for pair in zip(mbs[warmup:], mbs, strict=False) for i in (fwd(stage, pair[0]), bwd(stage, pair[1]))
        ]
        yield [fwd(stage, mb) for mb in mbs[:warmup]] + steady + [bwd(stage, mb) for mb in mbs[len(mbs) - warmup :]]


@pytest.fixture(params=[one_at_a_time, all_forwards_first, early_first_rank])
def registered(request) -> Iterator[str]:
    name = f"own-{request.param.__name__}"
    schedule(name=name)(request.param)
    yield name
    del REGISTRY[name]


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("count", [2, 4, 12])
def test_the_prediction_of_a_registered_schedule_is_that_of_its_own_program(registered, recompute, count):
    """The planner once took a schedule whose first rank held all micro-batches for GPipe, and added waits."""
    profile = model(8)
    found = plan(
        profile, MACHINE, num_microbatches=count, schedules=[registered], depths=[4], recompute=recompute, shard="none"
    )
    assert found.schedule == registered
    cost = of_plan(profile.at(found.microbatch_size), found, MACHINE, runtime=FREE)
    ends = simulate(program_of(found), cost, repeats=6).step_ends_s
    assert found.prediction.period_s == pytest.approx(ends[-1] - ends[-2])


@pytest.mark.parametrize(
    "order, twin, count",
    [(one_at_a_time, "naive", 8), (all_forwards_first, "gpipe", 8), (all_forwards_first, "gpipe", 2)],
)
@pytest.mark.parametrize("recompute", [None, "none", "stage"])
def test_a_schedule_under_another_name_gets_the_same_plan(order, twin, count, recompute):
    schedule(name="twin")(order)
    options = {"num_microbatches": count, "depths": [2, 4], "recompute": recompute}
    try:
        own = plan(model(8), MACHINE, schedules=["twin"], **options)
    finally:
        del REGISTRY["twin"]
    known = plan(model(8), MACHINE, schedules=[twin], **options)
    assert own.partition == known.partition
    assert own.prediction.period_s == pytest.approx(known.prediction.period_s, rel=1e-9)
    assert own.prediction.peak_bytes == known.prediction.peak_bytes


def test_a_registered_schedule_competes_with_its_own_time():
    """One micro-batch at a time loses to 1F1B, and is shown with its own throughput."""
    schedule(name="slow-one")(one_at_a_time)
    try:
        found = plan(model(8), MACHINE, num_microbatches=8, depths=[4])
        own = plan(model(8), MACHINE, num_microbatches=8, depths=[4], schedules=["slow-one"])
    finally:
        del REGISTRY["slow-one"]
    line = next(each for each in found.candidates if each.family == "slow-one, depth 4")
    assert own.prediction.throughput <= line.throughput * (1 + 1e-9)
    assert own.prediction.throughput < found.prediction.throughput / 2
