"""Plans for a device that the model does not fit."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_

from pipefit.cost import FREE, of_plan
from pipefit.errors import InfeasibleError, PipefitError, PlanError
from pipefit.ir import Spill
from pipefit.ir.liveness import device_peak_bytes
from pipefit.planner import Cap, gpt_profile, plan
from pipefit.planner.estimate import estimate
from pipefit.planner.explain import explain, spill_lines
from pipefit.planner.lane_limits import limit_of
from pipefit.planner.machines import load_topology
from pipefit.planner.simulated import simulated
from pipefit.planner.spilled_candidates import _even, spilled_configs
from pipefit.planner.under_cap import problem_under_cap
from pipefit.schedules import Shape, generate
from pipefit.schedules.catalogue import program_of, shape_of
from pipefit.simulate import simulate
from pipefit.spec import Layer, Level, Partition, Placement, Plan, Profile, SpillSpec, Tier, Topology
from pipefit.verify import verify

pytestmark = pytest.mark.slow

LAYERS = tuple(Layer(f"layer{i}", 20e-3, 20e-3, 20e-3, 2e6, 20e6, 100e6) for i in range(12))
PROFILE = Profile("twelve", 1, LAYERS, optimizer_s=0.12)
HOST, DISK = Tier("host", 64e9, 10e9, 10e9), Tier("disk", 1e12, 2e9, 1e9)
MACHINE = Topology((Level("machine", 1, 1e9),), tiers=(HOST, DISK))


def capped(profile, machine, *, num_microbatches=8, schedule=None, **cap):
    """The plan under a cap."""
    schedules = [schedule] if schedule else None
    return plan(profile, machine, num_microbatches=num_microbatches, schedules=schedules, cap=Cap(**cap))


def cost_of(plan, state=2.0):
    machine = SERVER if plan.placement.num_ranks > 1 else MACHINE
    return of_plan(PROFILE, plan, machine, state_per_weight=state, runtime=FREE)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device_bytes", [0.9e9, 1.5e9, 3e9])
def test_a_plan_fits_its_cap_is_right_and_says_how_far_from_the_limit_it_is(tier, device_bytes):
    plan = capped(PROFILE, MACHINE, device_bytes=device_bytes, num_microbatches=4, tier=tier)
    program, cost = program_of(plan), cost_of(plan)
    resident = 0.0 if plan.spill.optim_slots else cost.resident_bytes(range(len(plan.partition.stages)))
    assert device_peak_bytes(program, 0, cost.size_bytes, resident)[0] == plan.spill.peak_bytes <= device_bytes
    assert verify(program, capacity_bytes=device_bytes, size=cost.size_bytes, tier_bytes=64e9).ok
    assert plan.spill.limit_s <= plan.prediction.period_s + 0.11  # a pass need not wait for the fill of the first
    assert plan.prediction.period_s == pytest.approx(
        (simulate(program, cost, repeats=3).makespan_s - simulate(program, cost).makespan_s) / 2
    )
    assert f"{plan.spill.binds} binds" in explain(plan, PROFILE)


def test_layers_that_share_a_weight_get_a_slot_each():
    plan = capped(PROFILE, MACHINE, device_bytes=1.2e9, num_microbatches=2, ties=((0, 11),))
    assert plan.spill.weights_slots >= 2
    last = len(plan.partition.stages) - 1
    tied = generate(plan.schedule, shape_of(plan, ties=((0, last),)))
    assert verify(tied, capacity_bytes=1.2e9, size=cost_of(plan).size_bytes).ok


def test_activations_on_the_tier_make_room_for_more_micro_batches():
    wish = {"device_bytes": 0.9e9, "num_microbatches": 24}
    with pytest.raises(InfeasibleError):
        capped(PROFILE, MACHINE, activations=False, **wish)
    plan = capped(PROFILE, MACHINE, activations=True, **wish)
    # Where nothing fits without, nobody need ask for it; where something does, it is not done.
    unasked = capped(PROFILE, MACHINE, **wish)
    assert unasked.spill == replace_(plan.spill, resident_s=unasked.spill.resident_s) and unasked.spill.activations
    assert "wait on the tier until their replay" in explain(unasked, PROFILE)
    assert not capped(PROFILE, MACHINE, device_bytes=0.9e9, num_microbatches=4).spill.activations
    program, cost = program_of(plan), cost_of(plan)
    assert any(i.kind == "act" for i in program.ranks[0])
    resident = 0.0 if plan.spill.optim_slots else cost.resident_bytes(range(len(plan.partition.stages)))
    listed, _ = device_peak_bytes(program, 0, cost.size_bytes, resident)
    # Those that are on their way to the tier are still on the device.
    assert listed + 2 * max(cost.act_bytes[:-1]) == plan.spill.peak_bytes <= 0.9e9
    assert verify(program, capacity_bytes=0.9e9, size=cost.size_bytes).ok


def test_a_plan_says_what_a_larger_device_would_do():
    plan = capped(PROFILE, MACHINE, device_bytes=1.5e9, num_microbatches=4)
    resident = capped(PROFILE, MACHINE, device_bytes=16e9, num_microbatches=4)
    assert plan.spill.resident_s == resident.prediction.period_s < plan.prediction.period_s
    share = resident.prediction.period_s / plan.prediction.period_s
    assert f"speed: {share:.0%} of that of a device which holds the whole model" in explain(plan, PROFILE)


def test_no_candidate_that_fits_is_faster_than_the_winner():
    # With one slot copies wait for each other, which no limit of a lane knows: many such promise more than they keep.
    machine, cap = load_topology("one-gpu"), Cap(10e9)
    profile = gpt_profile(layers=12, hidden=2560, heads=32, device=machine.device)
    winner = plan(profile, machine, num_microbatches=4, cap=cap)
    problem, resident = problem_under_cap(profile, machine, cap, 4, 1, None, None)
    estimates = [estimate(problem, config) for config in spilled_configs(problem, resident, activations=False)]
    periods = [found.period_s for each in estimates if each.fits and (found := simulated(problem, each))]
    assert len(periods) > 40 and winner.prediction.period_s == pytest.approx(min(periods))


def test_a_model_that_fits_is_not_spilled():
    plan = capped(PROFILE, MACHINE, device_bytes=16e9)
    assert plan.spill is None and len(plan.partition.stages) == 1


def test_a_larger_cap_never_makes_it_slower():
    caps = (0.9e9, 1.2e9, 2e9, 4e9)
    periods = [capped(PROFILE, MACHINE, device_bytes=cap, tier="disk").prediction.period_s for cap in caps]
    assert periods == sorted(periods, reverse=True)


def test_a_cap_too_small_is_refused_with_the_smallest_that_works():
    with pytest.raises(InfeasibleError, match=r"the smallest cap that works is .*, with .* layer0, has 95.37 MiB") as e:
        capped(PROFILE, MACHINE, device_bytes=2e8)
    from pipefit.units import parse_quantity

    smallest = parse_quantity(str(e.value).split("works is ")[1].split(",")[0], "bytes")
    assert capped(PROFILE, MACHINE, device_bytes=smallest * 1.001).spill.peak_bytes <= smallest * 1.001
    with pytest.raises(InfeasibleError):
        capped(PROFILE, MACHINE, device_bytes=smallest * 0.99)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"device_bytes": 0.0}, "device_bytes: expected more than 0"),
        ({"device_bytes": 1e9, "tier": "moon"}, "no tier 'moon'"),
        ({"device_bytes": 1e9, "host_bytes": 1e9}, "does not fit the host"),
    ],
)
def test_wishes_without_meaning_are_refused(wish, says):
    with pytest.raises((PlanError, InfeasibleError), match=says):
        capped(PROFILE, MACHINE, **wish)


def test_a_plan_that_spills_comes_back_from_its_file(tmp_path):
    plan = capped(PROFILE, MACHINE, device_bytes=1.5e9)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    with pytest.raises(PipefitError, match="host or disk"):
        SpillSpec("moon", 1.0)


def test_what_is_moved_is_counted_by_hand():
    shape = Shape(4, 2)
    program = generate("spilled", shape)
    layers = PROFILE.layers[:4]
    small = Profile("four", 1, layers, optimizer_s=0.04)
    stages, spill = Partition.from_counts([1] * 4), SpillSpec("host", 1e9)
    plan = Plan(stages, Placement(((0,),) * 4), "spilled", 2, num_chunks=4, spill=spill)
    cost = of_plan(small, plan, MACHINE, runtime=FREE)
    moved = limit_of(program, 0, cost, HOST)
    assert moved.read_bytes == {"weights": (6 - 2) * 100e6, "optim": 4 * 200e6}  # two lie in their slots
    assert moved.written_bytes == {"weights": 4 * 100e6, "optim": 4 * 200e6}
    assert moved.compute_s == pytest.approx(2 * (4 * 60e-3 + 3 * 20e-3))
    lanes = moved.lanes
    assert lanes["host → device"] == pytest.approx(0.12) and lanes["device → host"] == pytest.approx(0.12)
    turns = limit_of(program, 0, cost, replace_(HOST, one_channel=True))
    assert turns.lanes["host ⇄ device"] == pytest.approx(0.24) and set(turns.lanes) == {"compute", "host ⇄ device"}
    there = generate("spilled", replace_(shape, spill=Spill("host", 2, 0, (0, 1, 2, 3), False, (0, 1, 2, 3))))
    lanes = limit_of(there, 0, replace(cost, host_step_s=(0.03,) * 4), HOST).lanes
    assert lanes["host → device"] == pytest.approx(0.06) and lanes["device → host"] == pytest.approx(0.04)
    assert lanes["step on the host"] == pytest.approx(0.12)


SERVER = replace_(MACHINE, levels=(Level("server", 4, 10e9), Level("rack", 2, 1e9)))


@pytest.mark.parametrize("device_bytes", [0.9e9, 1.15e9])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_plan_for_several_ranks_keeps_the_cap_on_each_and_visits_a_stage_for_all_micro_batches(
    num_ranks, device_bytes
):
    plan = capped(PROFILE, SERVER, device_bytes=device_bytes, num_microbatches=6, num_ranks=num_ranks)
    num_stages = len(plan.partition.stages)
    assert plan.schedule == "breadth-first" and num_stages == num_ranks * plan.num_chunks > num_ranks
    assert plan.placement.ranks == tuple((stage % num_ranks,) for stage in range(num_stages))
    program, cost = program_of(plan), cost_of(plan)
    for rank, claimed in enumerate(plan.prediction.peak_bytes):
        states = 0.0 if plan.spill.optim_slots else cost.resident_bytes(program.header.stages_of(rank))
        listed = device_peak_bytes(program, rank, cost.size_bytes, states)[0]
        # What is sent is held until it has arrived: four messages of 2 MB each way, at least.
        assert max(listed + 16e6, simulate(program, cost).peak_bytes(rank)) == pytest.approx(claimed)
        assert claimed <= device_bytes
    assert max(plan.prediction.peak_bytes) == plan.spill.peak_bytes
    assert verify(program, capacity_bytes=device_bytes, size=cost.size_bytes, tier_bytes=64e9).ok
    assert plan.spill.limit_s <= plan.prediction.period_s * (1 + 1e-9)
    assert plan.prediction.period_s == pytest.approx(
        (simulate(program, cost, repeats=3).makespan_s - simulate(program, cost).makespan_s) / 2
    )
    # The last stage replays nothing, nor do those that there is room for to keep what they saved.
    assert {stage for stage, _ in program.recomputed} == set(range(num_stages - 1)) - set(plan.spill.keeps)
    # However many micro-batches there are, as much is moved.
    more = program_of(replace_(plan, num_microbatches=12))
    for rank in range(num_ranks):
        few, many = (limit_of(each, rank, cost, HOST) for each in (program, more))
        assert (few.read_bytes, few.written_bytes) == (many.read_bytes, many.written_bytes)


def test_more_ranks_make_it_faster_and_a_model_that_fits_them_together_is_not_spilled():
    plans = [
        capped(PROFILE, SERVER, device_bytes=1.5e9, num_microbatches=8, num_ranks=num_ranks)
        for num_ranks in (1, 2, 3, 4)
    ]
    periods = [plan.prediction.period_s for plan in plans]
    assert periods == sorted(periods, reverse=True)
    assert all(plan.spill for plan in plans[:3]) and plans[3].spill is None
    assert (plans[3].schedule, len(plans[3].partition.stages)) == ("1f1b", 4)
    told = " ".join(explain(plans[2], PROFILE).split())
    assert "on each of 3 ranks" in told
    assert "devices which hold the whole model between them" in told


@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 1), (4, 2)])
def test_copies_of_a_spilled_pipeline_keep_the_cap_and_halve_the_work(num_ranks, depth):
    wish = {"device_bytes": 1.15e9, "num_microbatches": 8}
    fast = replace_(SERVER, tiers=(Tier("host", 64e9, 1e12, 1e12),))
    one = capped(PROFILE, fast, num_ranks=depth, **wish)
    two = capped(PROFILE, fast, num_ranks=num_ranks, copies=2, **wish)
    assert two.data == 2 and two.placement.num_ranks == num_ranks and {len(r) for r in two.placement.ranks} == {2}
    assert one.spill and two.spill and max(two.prediction.peak_bytes) == two.spill.peak_bytes <= 1.15e9
    program = program_of(two)
    assert verify(program, capacity_bytes=1.15e9, size=cost_of(two).size_bytes, tier_bytes=64e9).ok
    assert any(i.op == "reduce" for i in program.ranks[0])
    assert two.prediction.period_s < 0.7 * one.prediction.period_s


def test_ranks_of_one_machine_share_the_rates_and_the_room_of_its_tiers():
    assert [SERVER.tiers_among(n)[0].read_bytes_per_s for n in (1, 2, 4, 8)] == [10e9, 5e9, 2.5e9, 2.5e9]
    wish = {"device_bytes": 1.2e9, "num_microbatches": 4, "num_ranks": 2}
    assert capped(PROFILE, SERVER, host_bytes=3.7e9, **wish).spill
    with pytest.raises(InfeasibleError, match="does not fit the host"):
        capped(PROFILE, SERVER, host_bytes=3.5e9, **wish)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 3), ("breadth-first", 2), ("gpipe", 0), ("1f1b", 0)])
def test_a_schedule_and_chunks_that_are_asked_for_are_planned(schedule, chunks):
    cap = 3.5e9 if not chunks else 1.5e9
    plan = capped(
        PROFILE, SERVER, device_bytes=cap, num_microbatches=4, num_ranks=2, schedule=schedule, num_chunks=chunks
    )
    assert (plan.schedule, plan.num_chunks) == (schedule, chunks or 1)
    assert verify(program_of(plan), capacity_bytes=cap, size=cost_of(plan).size_bytes).ok


def test_a_cap_too_small_for_several_ranks_is_refused_with_the_smallest_that_works():
    wish = {"num_microbatches": 4, "num_ranks": 5}
    with pytest.raises(InfeasibleError, match=r"on each of 5 ranks: the smallest cap .* one slot per rank") as e:
        capped(PROFILE, replace_(SERVER, levels=(Level("server", 8, 1e9),)), device_bytes=2e8, **wish)
    from pipefit.units import parse_quantity

    smallest = parse_quantity(str(e.value).split("works is ")[1].split(",")[0], "bytes")
    many = replace_(SERVER, levels=(Level("server", 8, 1e9),))
    plan = capped(PROFILE, many, device_bytes=smallest * 1.001, **wish)
    assert plan.spill.peak_bytes <= smallest * 1.001 and len(plan.partition.stages) == 10
    with pytest.raises(InfeasibleError):
        capped(PROFILE, many, device_bytes=smallest * 0.99, **wish)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"num_ranks": 9}, "at most the 8 devices of the topology, and as many in a pipeline as the 12 layers"),
        ({"num_ranks": 3, "copies": 2}, "3 ranks cannot be 2 copies of a pipeline"),
        ({"num_ranks": 2, "schedule": "pipedream"}, "pipedream does not flush"),
        ({"num_ranks": 2, "schedule": "spilled"}, "spilled is for one rank; for 2 use breadth-first"),
        ({"num_ranks": 2, "schedule": "gpipe", "num_chunks": 2}, "gpipe has one stage per rank"),
        ({"num_ranks": 2, "schedule": "data-parallel"}, "all of the model's weights"),
    ],
)
def test_orders_that_a_cap_has_no_meaning_for_are_refused(wish, says):
    with pytest.raises(PlanError, match=says):
        capped(PROFILE, SERVER, device_bytes=1e9, **wish)


def test_tied_layers_on_several_ranks_fit_too():
    wish = {"ties": ((0, 11),), "clip": True, "num_ranks": 2}
    plan = capped(PROFILE, SERVER, device_bytes=1.2e9, num_microbatches=4, **wish)
    last = len(plan.partition.stages) - 1
    tied = generate(plan.schedule, shape_of(plan, ties=((0, last),), clip=True))
    assert verify(tied, capacity_bytes=1.2e9, size=cost_of(plan).size_bytes).ok


def planned(rate, step_on="auto", link=10e9, tier="host"):
    host = Tier("host", 64e9, link, link, step_bytes_per_s=rate)
    machine = Topology((Level("machine", 1, 1e9),), tiers=(host, DISK))
    return capped(PROFILE, machine, device_bytes=1.5e9, num_microbatches=1, step_on=step_on, tier=tier)


@pytest.mark.parametrize(("rate", "on_host"), [(100e9, "some"), (1e9, "some"), (0.05e9, "none"), (0.0, "none")])
def test_stages_step_where_the_lane_that_binds_is_spared(rate, on_host):
    """A link of 3 GB/s binds: states that stay on the host spare it, as long as the host steps fast enough."""
    plan = planned(rate, link=3e9)
    share = len(plan.spill.on_host) / len(plan.partition.stages)
    assert {"some": 0 < share < 1, "none": share == 0}[on_host], plan.spill
    # What lies in its slot from step to step is stepped there.
    assert 0 not in plan.spill.on_host
    program = program_of(plan)
    verify(program).raise_if_bad()
    assert program.header.spill.on_host == plan.spill.on_host
    places = ("device", "host") if rate else ("device",)
    assert plan.prediction.period_s <= (1 + 1e-9) * min(
        planned(rate, place, 3e9).prediction.period_s for place in places
    )
    words = [line for line in spill_lines(plan) if line.startswith("steps: ")]
    said = {"some": "of stages", "none": "on the device"}[on_host]
    assert len(words) == 1 and said in words[0]
    assert "steps: on the host, where the optimizer's states stay" in spill_lines(planned(100e9, "host"))


def test_a_step_on_the_host_is_refused_where_the_records_are_on_disk():
    plan = planned(100e9, tier="disk")
    assert not plan.spill.on_host and any("read from the disk just the same" in line for line in spill_lines(plan))
    with pytest.raises(PlanError, match="from a disk they would all have to be read"):
        planned(100e9, "host", tier="disk")
    with pytest.raises(PlanError, match="expected one of auto, device, host"):
        planned(100e9, "moon")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_shards_are_as_even_as_they_can_be(weights, count):
    counts = _even(weights, count)
    assert sum(counts) == len(weights) and len(counts) <= count

    def largest(cuts):
        ends = [0, *cuts, len(weights)]
        return max(sum(weights[a:b]) for a, b in pairwise(ends))

    best = min(
        largest(cuts)
        for shards in range(1, min(count, len(weights)) + 1)
        for cuts in combinations(range(1, len(weights)), shards - 1)
    )
    assert largest([sum(counts[:n]) for n in range(1, len(counts))]) == best


@pytest.mark.parametrize(("num_ranks", "more_bytes"), [(1, 2.6e9), (2, 1.6e9)])
def test_as_many_stages_keep_their_activations_as_the_cap_has_room_for(num_ranks, more_bytes):
    def planned(device_bytes, **wishes):
        return capped(PROFILE, SERVER, device_bytes=device_bytes, num_microbatches=6, num_ranks=num_ranks, **wishes)

    few, many = planned(0.9e9), planned(more_bytes)
    assert 0 < len(few.spill.keeps) < len(few.partition.stages)
    assert set(range(len(many.partition.stages))) == set(many.spill.keeps)
    assert not program_of(many).recomputed
    for made in (few, many):
        cost = cost_of(made)
        assert verify(program_of(made), capacity_bytes=made.spill.device_bytes, size=cost.size_bytes).ok
        replaying = planned(made.spill.device_bytes, keep=False)
        assert not replaying.spill.keeps and program_of(replaying).recomputed
        assert made.prediction.period_s < replaying.prediction.period_s
    assert "keep theirs; the others replay" in "".join(spill_lines(few))
