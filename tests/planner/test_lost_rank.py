"""Plans that have lost a rank: who takes over, what it costs by simulation and by hand, and what is refused."""

import math

import msgspec
import pytest
import torch
from tests.grids import columns
from torch import nn

from pipefit import Pipeline
from pipefit.cost import CostModel
from pipefit.errors import PlanError, ScheduleError
from pipefit.ir.liveness import peak_inflight
from pipefit.ir.program import Program
from pipefit.planner import by_hand, plan_without
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan
from pipefit.verify import verify

CHUNKS = {"interleaved": 2, "breadth-first": 2, "zb-v": 2}
SYNCHRONOUS = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", *CHUNKS)


def plan_of(p: int, d: int, m: int, schedule: str = "1f1b", **more) -> Plan:
    """Copies of a pipeline, with micro-batches for each."""
    chunks = CHUNKS.get(schedule, 1)
    sizes = {"num_ranks": p * d, "num_microbatches": m * d, "num_chunks": chunks, "replicas": (d,) * p}
    return by_hand(p * chunks, schedule=schedule, **sizes, **more)


def time_of(plan: Plan, f: int, i: int, w: int) -> float:
    stages = len(plan.partition.stages)
    return simulate(program_of(plan), CostModel((f,) * stages, (i,) * stages, (w,) * stages)).makespan_s


def least(d: int, m: int, stage: int, f: int, i: int, w: int) -> int:
    """The time that no order of this placement can beat, by hand.

    A sibling of the lost rank has at least ⌈md/(d−1)⌉ micro-batches, and the first reaches it after `stage` forwards.
    """
    return stage * f + math.ceil(m * d / (d - 1)) * (f + i + w)


SIZES = ((2, 2, 2), (2, 3, 4), (3, 2, 3), (4, 2, 4), (4, 3, 6), (4, 4, 8))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize(("p", "d", "m"), SIZES)
def test_a_lost_rank_costs_what_the_work_of_its_siblings_says(p, d, m, f, i, w) -> None:
    cost = CostModel((f,) * p, (i,) * p, (w,) * p)
    plan = plan_of(p, d, m)
    assert time_of(plan, f, i, w) == (m + p - 1) * (f + i + w)
    for stage in range(p):
        rest = plan_without(plan, stage, cost=cost, held=m * d)
        assert time_of(rest, f, i, w) == least(d, m, stage, f, i, w)
        if (f, i, w) == (1, 1, 1):
            # The same time without the simulator: cells of one unit each.
            rows = columns(program_of(rest))
            assert len(rows) == p * d - 1 and len(rows[0]) == least(d, m, stage, f, i, w)


def fullest(program: Program) -> float:
    return max(peak_inflight(program, rank) for rank in range(len(program.ranks)))


def is_proved(plan: Plan) -> bool:
    try:
        return not verify(program_of(plan)).violations
    except ScheduleError:
        return False


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_patched_plan_is_never_slower_than_its_own_schedule_and_holds_no_more(schedule) -> None:
    plan = plan_of(3, 2, 4, schedule)
    for lost in range(6):
        rest = plan_without(plan, lost, clip=True)
        program = program_of(rest)
        assert verify(program).violations == ()
        own = msgspec.structs.replace(rest, schedule=schedule, options={})
        room = [program_of(plan)]
        if is_proved(own):
            room.append(program_of(own))
            assert time_of(rest, 1, 1, 1) <= time_of(own, 1, 1, 1)
        assert fullest(program) <= max(map(fullest, room))


def test_ranks_are_lost_one_after_the_other_until_one_is_left() -> None:
    """A stage without another copy goes to the rank that has the least work."""
    plan = plan_of(3, 2, 3)
    placements = []
    while plan.placement.num_ranks > 1:
        plan = plan_without(plan, plan.placement.num_ranks // 2, clip=True, ties=((0, 2),))
        placements.append(plan.placement.ranks)
    assert placements == [
        ((0,), (1, 3), (2, 4)),
        ((0,), (1, 2), (3,)),
        ((0,), (1,), (2,)),
        ((0,), (0,), (1,)),
        ((0,), (0,), (0,)),
    ]


def test_copies_share_weights_as_long_as_a_stage_has_several() -> None:
    plan = plan_of(2, 2, 2, shard="weights")
    shards = []
    while plan.placement.num_ranks > 1:
        plan = plan_without(plan, 0)
        shards.append(plan.shard)
        assert verify(program_of(plan)).violations == ()
    assert shards == ["weights", "none", "none"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "data-parallel"])
def test_a_patched_plan_trains_as_one_process_does(schedule) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3 * CHUNKS.get(schedule, 1))))

    stages = 3 if schedule != "data-parallel" else 1
    plan = by_hand(
        len(layers()),
        num_ranks=6,
        replicas=(2,) * stages if stages > 1 else (),
        schedule=schedule,
        num_microbatches=8,
        num_chunks=CHUNKS.get(schedule, 1),
    )
    data = [(x, x.tanh()) for x in torch.randn(3, 16, 4)]
    whole = layers()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    expected = []
    for x, y in data:
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    # One copy is lost, then the other one: its stages go to a rank that has others.
    for lost in ((1,), (1, 3)):
        rest = plan
        for rank in lost:
            rest = plan_without(rest, rank)
        pipe = Pipeline(
            layers(), plan=rest, loss=nn.MSELoss(), optimizer=lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)
        )
        assert pipe.fit(data) == pytest.approx(expected, rel=1e-6)
        state = pipe.state_dict()
        for name, weight in whole.state_dict().items():
            torch.testing.assert_close(state[name], weight)


def test_what_cannot_lose_a_rank_is_refused() -> None:
    plan = plan_of(2, 2, 2)
    with pytest.raises(PlanError, match="expected one of several ranks to be lost, got rank 4 of 4"):
        plan_without(plan, 4)
    with pytest.raises(PlanError, match="got rank 0 of 1"):
        plan_without(by_hand(1, num_ranks=1, schedule="1f1b", num_microbatches=1), 0)
    with pytest.raises(PlanError, match="only a synchronous schedule"):
        plan_without(plan_of(2, 2, 2, "pipedream"), 0)
