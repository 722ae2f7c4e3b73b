"""Spilling: which stage sits in which slot, what it costs in time and memory."""

import math
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waits import chain

from pipefit.cost import CostModel, unit
from pipefit.errors import PipefitError, ScheduleError
from pipefit.ir import Instruction, Op, Program, Spill
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, tier_peak_bytes
from pipefit.ir.op import OP_SPEC, Lane
from pipefit.ir.residency import kept_fetches
from pipefit.ir.values import Value
from pipefit.passes.stays import stays
from pipefit.planner.lane_limits import limit_of
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.simulate.event_engine import EventEngine
from pipefit.simulate.flat_program import flat_program
from pipefit.spec import Tier
from pipefit.timeline import from_chrome_trace, to_chrome_trace
from pipefit.verify import verify

WO = ("weights", "optim")
SIZES = {"weights": 100.0, "wgrad": 100.0, "optim": 200.0, "act": 7.0, "grad": 7.0, "saved": 30.0}


def size(value: Value) -> float:
    return SIZES.get(value.kind, 0.0) * (2 if value.stage == 1 and value.kind in ("weights", "wgrad", "optim") else 1)


def copies(program, op, kind, rank=0) -> list[int]:
    return [i.stage for i in program.ranks[rank] if i.op is op and i.kind == kind]


def fewest_loads(visits, num_slots, here=frozenset()):
    """By trying everything."""
    if not visits:
        return 0
    stage, rest = visits[0], visits[1:]
    if stage in here:
        return fewest_loads(rest, num_slots, here)
    if len(here) < num_slots:
        return 1 + fewest_loads(rest, num_slots, here | {stage})
    return 1 + min(fewest_loads(rest, num_slots, here - {gone} | {stage}) for gone in here)


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
def test_no_choice_of_victims_loads_less_often(visits, num_slots):
    found = stays([(index, (stage,)) for index, stage in enumerate(visits)], num_slots)
    assert len(found) == fewest_loads(visits, num_slots)
    assert sorted(index for stay in found for index in stay.visits) == list(range(len(visits)))


def test_stages_stay_at_the_turns_and_only_what_changed_is_written_back():
    program = generate("spilled", Shape(4, 3, num_steps=2))
    # Two stages stay where forwards turn to backwards, and two where the next step begins.
    assert copies(program, Op.FETCH, "weights") == [0, 1, 2, 3, 1, 0, 2, 3, 1, 0]
    assert sorted(copies(program, Op.EVICT, "weights")) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert copies(program, Op.FETCH, "wgrad") == []


def test_clipping_costs_another_visit_of_every_stage_that_could_not_stay():
    program = generate("spilled", Shape(4, 3, clip=True))
    assert copies(program, Op.EVICT, "wgrad") == copies(program, Op.FETCH, "wgrad")[::-1] == [3, 2]
    assert copies(program, Op.FETCH, "weights") == [0, 1, 2, 3, 1, 0, 2, 3]


def test_weights_are_moved_as_often_however_many_micro_batches_there_are():
    few, many = (generate("spilled", Shape(4, m)) for m in (1, 16))
    for op in (Op.FETCH, Op.EVICT):
        assert copies(few, op, "weights") == copies(many, op, "weights")


def test_a_fetch_runs_beside_the_visit_before_it_unless_it_is_told_to_wait():
    def makespan(copy, **rest):
        program = generate("spilled", Shape(4, 4, **rest))
        return simulate(program, unit(program.header, 4, 8, copy=copy)).makespan_s

    busy = 4 * (4 + 8) + 3 * 4  # and the replay of three stages of four
    first_fill, last_write = 1, 2
    assert makespan(0) == busy
    assert makespan(4) == busy + first_fill + last_write
    assert makespan(4, prefetch=0) > makespan(4) + 4


def fetch(stage, slot, version=0):
    return Instruction(Op.FETCH, stage, version=version, kind="weights", tier="host", slot=slot)


def evict(stage, version):
    return Instruction(Op.EVICT, stage, version=version, kind="weights", tier="host")


def test_the_next_pass_begins_with_the_weights_that_lie_in_their_slots():
    program = generate("spilled", Shape(2, 1, spill=Spill.of(2, slots=1)))
    cost = unit(program.header, 2, 4, copy=2)
    once, twice = (simulate(program, cost, repeats=n) for n in (1, 2))
    read, written = 1, 2  # a first fetch; weights and states, while the next pass computes already
    assert twice.makespan_s == 2 * once.makespan_s - read - written
    assert [kept_fetches(program, 0, later) for later in (False, True)] == [frozenset(), frozenset({0})]
    assert program.ranks[0][0] == fetch(0, 0)


def test_weights_that_stepped_on_the_host_are_waited_for_and_read_again():
    program = generate("spilled", Shape(2, 1, spill=Spill("host", 1, 0, (0, 1), on_host=(0, 1))))
    once, twice = (simulate(program, unit(program.header, 2, 4, copy=2), repeats=n) for n in (1, 2))
    assert twice.makespan_s == 2 * once.makespan_s and not kept_fetches(program, 0, later=True)


def test_a_pass_begins_when_the_steps_on_the_host_of_the_one_before_have_ended():
    """Between two passes the optimizers may be read, also those of stages that the next pass needs late."""
    program = generate("spilled", Shape(3, 1, spill=Spill("host", 2, 1, (0, 1, 2), on_host=(2,))))
    cost = replace(unit(program.header, 2, 4), host_step_s=(100, 100, 100))
    timeline = simulate(program, cost, repeats=2)
    (ended,) = (e.end_s for e in timeline.events if timeline.instruction(e).op is Op.HOST_STEP and not e.repeat)
    assert ended == min(e.start_s for e in timeline.events if e.repeat)


def test_weights_are_kept_only_in_the_slot_they_left_last_and_only_in_their_last_version():
    header = generate("spilled", Shape(2, 1, spill=Spill.of(2, slots=2))).header
    drop = Instruction(Op.DROP, 1, version=1, kind="weights")
    listed = [fetch(0, 0), fetch(1, 1), evict(0, 1), fetch(0, 0, 1), evict(0, 2), evict(1, 1), fetch(1, 0, 1), drop]
    program = Program(header, (tuple(listed),))
    # Stage 0 comes back into its slot; stage 1 into another, after which nothing of stage 0 lies there.
    assert kept_fetches(program, 0) == {3}
    assert kept_fetches(program, 0, later=True) == {1, 3}


def costs_of_copies(program, one_channel=False, check=0.0, read=2.0, write=2.0):
    tier = Tier("host", math.inf, read, write, one_channel=one_channel, check_bytes_per_s=check)
    many = len(program.header.placement)
    sizes = {"weight_bytes": (2,) * many, "optim_bytes": (4,) * many}
    return CostModel((1,) * many, (1,) * many, (1,) * many, **sizes, tiers=(tier,))


def copies_of(timeline, op):
    return [(e.start_s, e.end_s) for e in timeline.events if timeline.instruction(e).op is op]


def test_reads_and_writes_of_one_channel_take_turns():
    program = generate("spilled", Shape(4, 1))
    alone, shared = (simulate(program, costs_of_copies(program, each), repeats=3) for each in (False, True))
    assert shared.period_s > alone.period_s
    moved = sorted(copies_of(alone, Op.FETCH) + copies_of(alone, Op.EVICT))
    assert any(a[1] > b[0] for a, b in pairwise(moved))
    # However they interleave, each second of the channel is used once.
    in_turns = copies_of(shared, Op.FETCH) + copies_of(shared, Op.EVICT)
    seconds = sum(end - start for start, end in copies_of(alone, Op.FETCH) + copies_of(alone, Op.EVICT))
    assert seconds <= max(end for _, end in in_turns)
    cost = costs_of_copies(program, True)
    limit = limit_of(program, 0, cost, cost.tiers[0])
    assert limit.lanes["host ⇄ device"] <= shared.period_s and limit.limit_s <= shared.period_s + 1e-9


def test_what_is_known_later_but_begins_earlier_moves_in_the_gap():
    """A fetch that waits for its slot is known before an evict that is listed after it, and can begin long before."""
    program = generate("spilled", Shape(2, 1))
    engine = EventEngine(flat_program(program), None, 1)
    channel = (0, "disk")
    assert engine._through(channel, 10, 5) == (10, 15)
    assert engine._through(channel, 2, 3) == (2, 5)
    assert engine._through(channel, 4, 8) == (5, 18)
    assert engine._through(channel, 0, 1) == (0, 1)
    assert engine._through(channel, 12, 1) == (18, 19)
    taken = engine.taken[channel]
    assert all(a[1] <= b[0] for a, b in pairwise(taken)) and sum(b - a for a, b in taken) == 18


def test_checksums_take_the_time_of_whoever_computes():
    program = generate("spilled", Shape(3, 1))
    free, checked = (costs_of_copies(program, check=each, read=1e9, write=1e9) for each in (0.0, 4.0))
    kept = kept_fetches(program, 0, later=True)
    moved = [i for n, i in enumerate(program.ranks[0]) if i.op in (Op.FETCH, Op.EVICT) and n not in kept]
    seconds = sum(checked.size_bytes(Value(i.kind, i.stage, i.version)) / 4 for i in moved)
    periods = [simulate(program, cost, repeats=3).period_s for cost in (free, checked)]
    assert periods[1] - periods[0] == pytest.approx(seconds, abs=1e-6) and seconds > 5
    computes = [limit_of(program, 0, cost, cost.tiers[0]).lanes["compute"] for cost in (free, checked)]
    assert computes[1] - computes[0] == pytest.approx(seconds)


@pytest.mark.parametrize("prefetch", [None, 0])
@pytest.mark.parametrize("name", ["spilled", "interleaved"])
def test_the_critical_path_leads_through_the_copies_that_were_waited_for(name, prefetch):
    chunks = 3 if name == "interleaved" else 1
    program = generate(name, Shape(2, 4, num_chunks=chunks, spill=Spill.of(2 * chunks, slots=1), prefetch=prefetch))
    timeline = simulate(program, unit(program.header, 4, 8, copy=40), rendezvous=False)
    path = chain(timeline)
    assert path[0].start_s == timeline.start_s and path[-1].end_s == timeline.end_s
    work = [event for event in path if timeline.instruction(event).op not in (Op.SEND, Op.RECV)]
    gaps = [later.start_s - event.end_s for event, later in pairwise(work)]
    assert max(map(abs, gaps)) < 1e-9
    assert sum(timeline.instruction(event).op in (Op.FETCH, Op.EVICT) for event in path) > 5


def test_what_is_needed_first_is_written_back_first():
    program = generate("spilled", Shape(3, 1))
    written = [f"{i.kind} {i.stage}" for i in program.ranks[0] if i.op is Op.EVICT]
    assert written == ["optim 2", "weights 2", "optim 1", "weights 1", "weights 0", "optim 0"]


@pytest.mark.parametrize(("on_host", "more"), [((), set()), ((0, 2), {"host_step"})])
def test_a_trace_has_a_lane_for_each_direction_and_one_for_steps_on_the_host(on_host, more):
    program = generate("spilled", Shape(3, 1, spill=Spill("host", 2, 1, (0, 1, 2), on_host=on_host)))
    trace = to_chrome_trace(simulate(program, unit(program.header)))
    names = {item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "thread_name"}
    assert names == {"compute", "fetch", "evict"} | more
    assert from_chrome_trace(trace).program == program


def test_slots_are_counted_whole_and_everything_else_while_it_is_held():
    program = generate("spilled", Shape(3, 2))
    assert arena_bytes(program.header, 0, size) == 2 * (200 + 200) + 400
    highest, index = device_peak_bytes(program, 0, size)
    # The boundary activations of two micro-batches at two cuts, and what the last stage gives and saves.
    assert highest == 1200 + 4 * 7 + 7 + 30 and str(program.ranks[0][index]) == "fwd s2 m0 w0"
    assert device_peak_bytes(program, 0, size, resident_bytes=5)[0] == highest + 5
    assert tier_peak_bytes(program, 0, size) == (400 + 800, -1)
    clipped = generate("spilled", Shape(3, 2, clip=True))
    assert tier_peak_bytes(clipped, 0, size)[0] == 1200 + 100


def test_activations_on_the_tier_leave_room_for_one_cut_and_a_few_micro_batches():
    def held(activations):
        program = generate("spilled", Shape(8, 6, spill=Spill.of(8, activations=activations)))
        return device_peak_bytes(program, 0, lambda value: value.kind in ("act", "grad"))[0], program

    (kept, _), (parked, program) = held(False), held(True)
    assert kept >= 7 * 6 and parked <= 2 * 6 + 2
    # All but what enters the stages that stay at the turn, and the first, whose input is no activation.
    assert copies(program, Op.EVICT, "act") == [stage for stage in range(5) for _ in range(6)]
    assert sorted(copies(program, Op.FETCH, "act")) == copies(program, Op.EVICT, "act")
    assert tier_peak_bytes(program, 0, size)[0] == sum(size(Value(k, s, 0)) for s in range(8) for k in WO) + 30 * 7


def test_capacities_of_device_and_tier_are_held():
    program = generate("spilled", Shape(3, 2))
    assert verify(program, capacity_bytes=1265, size=size, tier_bytes=1200).ok
    (device,) = verify(program, capacity_bytes=1264, size=size).violations
    assert "slots 1.172 KiB" in device.message
    (tier,) = verify(program, size=size, tier_bytes=1199).violations
    assert tier.rule == "memory" and "the host holds 1.172 KiB for all ranks" in tier.message
    with pytest.raises(PipefitError, match="tier_bytes needs size"):
        verify(program, tier_bytes=1)


def test_simulated_memory_is_what_the_law_says():
    program = generate("interleaved", Shape(2, 2, num_chunks=3, spill=Spill("disk", 1, 1, (0, 1, 2, 3, 4))))
    cost = replace(
        unit(program.header),
        weight_bytes=(8.0,) * 6,
        wgrad_bytes=(8.0,) * 6,
        optim_bytes=(16.0,) * 6,
        act_bytes=(1.0,) * 6,
    )
    timeline = simulate(program, cost)
    for rank, resident in enumerate((0, 16)):
        highest, _ = device_peak_bytes(program, rank, cost.size_bytes, resident)
        assert timeline.peak_bytes(rank) <= highest
        assert timeline.memory[rank][0][1] >= arena_bytes(program.header, rank, cost.size_bytes) == 32


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("pipedream-2bw", Shape(2, 2, spill=Spill.of(2)), "needs a schedule that flushes"),
        ("spilled", Shape(3, 1, ties=((0, 2),), spill=Spill.of(3, slots=1)), "takes 2 slots, got 1"),
        ("spilled", Shape(3, 1, spill=Spill.of(4)), "no such stage"),
    ],
)
def test_what_cannot_be_spilled_is_refused(name, shape, says):
    with pytest.raises(ScheduleError, match=says):
        generate(name, shape)


def test_a_negative_prefetch_is_refused():
    with pytest.raises(ScheduleError, match="prefetch: expected at least 0, got -1"):
        Shape(3, 1, prefetch=-1)


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_of_a_pipeline_wait_between_steps_until_what_they_wrote_is_committed(depth):
    program = generate("breadth-first", Shape(depth, 2, 4 // depth, spill=Spill.of(4, 1, 1, "disk")))
    cost = unit(program.header, copy=4)
    disk = msgspec.structs.replace(cost.tiers[0], commit_s=3)
    plain, committed = (simulate(program, replace(cost, tiers=(tier,)), repeats=2) for tier in (cost.tiers[0], disk))

    def waits(timeline):
        """From the end of all writes of the first pass to the beginning of the second, by rank."""
        return [
            min(e.start_s for e in timeline.events if (e.rank, e.repeat) == (rank, 1) and computes(timeline, e))
            - max(e.end_s for e in timeline.events if (e.rank, e.repeat) == (rank, 0) and is_write(timeline, e))
            for rank in range(depth)
        ]

    if depth == 1:
        assert committed.makespan_s == plain.makespan_s
    else:
        assert min(waits(committed)) >= 3 > min(waits(plain))


def computes(timeline, event):
    return OP_SPEC[timeline.instruction(event).op].lane is Lane.COMPUTE


def is_write(timeline, event):
    return timeline.instruction(event).op is Op.EVICT
