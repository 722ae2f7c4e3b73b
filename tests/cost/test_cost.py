"""How long and how large: each law on numbers that can be checked by hand."""

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cost import FREE, CostModel, RuntimeCosts, of_plan, unit
from pipefit.cost.work import work_of
from pipefit.errors import PlanError
from pipefit.ir.graph import dependency_graph
from pipefit.ir.instruction import Instruction, bwd, bwd_input, bwd_weight, fwd
from pipefit.ir.op import COMPUTE_OPS, OP_SPEC, Kind, Lane, Op
from pipefit.ir.values import Value
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.spec import Device, Layer, Level, Partition, Placement, Plan, Profile, SpillSpec, StageSpec, Tier, Topology

THREE = (Layer("a", 1, 2, 3, 10, 100, 1000), Layer("b", 4, 5, 6, 20, 200, 2000), Layer("c", 7, 8, 9, 30, 300, 3000))
SERVER = Topology((Level("server", 2, 5.0, 0.5), Level("rack", 2, 2.0, 3.0)))


def by_counts(*counts: int, tensor: int = 1, **more) -> Plan:
    """A pipeline of consecutive layers, a rank for each stage."""
    stages = (StageSpec(stage.layers, tensor=tensor) for stage in Partition.from_counts(counts).stages)
    placement = Placement(tuple((rank,) for rank in range(len(counts))))
    return Plan(Partition(tuple(stages)), placement, "1f1b", 4, **more)


def test_every_operation_has_a_cost_and_every_kind_of_value_a_size():
    cost = CostModel((1,), (1,), (1,))
    for op in Op:
        assert cost.duration_s(Instruction(op, 0, 0, 0, kind="act", peer=0), 0) >= 0
    for kind in Kind:
        assert cost.size_bytes(Value(kind.value, 0, 0)) >= 0
    assert {op for op in Op if OP_SPEC[op].lane is Lane.COMPUTE} > COMPUTE_OPS


def test_a_full_backward_takes_as_long_as_its_halves_and_a_replay_as_its_forward():
    cost = CostModel((3,), (5,), (7,))
    assert cost.duration_s(bwd(0, 0), 0) == cost.duration_s(bwd_input(0, 0), 0) + cost.duration_s(bwd_weight(0, 0), 0)
    assert cost.duration_s(Instruction(Op.RECOMPUTE, 0, 0), 0) == cost.duration_s(fwd(0, 0), 0) == 3


def test_each_half_of_a_backward_takes_what_it_was_found_to_take_beyond_its_share():
    halved = [msgspec.structs.replace(layer, split_s=0.5, split_input_s=0.25) for layer in THREE]
    cost = of_plan(Profile("m", 1, tuple(halved)), by_counts(1, 2), Topology.local(2), runtime=FREE)
    assert cost.duration_s(bwd_input(1, 0), 1) == 5 + 8 + 2 * 0.25
    assert cost.duration_s(bwd_weight(1, 0), 1) == 6 + 9 + 2 * 0.5
    assert cost.duration_s(bwd(1, 0), 1) == 5 + 8 + 6 + 9
    assert cost.duration_s(bwd_input(0, 0), 0) == 0  # nothing learns before it: all is left to the second half
    assert cost.duration_s(bwd_weight(0, 0), 0) == 2 + 3


@given(
    st.sampled_from(["naive", "data-parallel", "gpipe", "1f1b", "interleaved", "breadth-first"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9).map(Fraction),
    st.integers(1, 9).map(Fraction),
)
def test_unit_costs_give_every_rank_f_plus_b_per_microbatch_over_all_its_stages(name, p, rounds, f, b):
    v = 2 if name in ("interleaved", "breadth-first") else 1
    program = generate(name, Shape(p, p * rounds, num_chunks=v))
    timeline = simulate(program, unit(program.header, f, b))
    assert {timeline.busy_s(rank) for rank in range(p)} == {p * rounds * (f + b)}


def test_unit_costs_split_the_backward_as_asked():
    header = generate("1f1b", Shape(2, 2)).header
    for cost in (unit(header, 1, 5, input=2), unit(header, input=2, weight=3)):
        assert (cost.backward_input_s, cost.backward_weight_s) == ((2, 2), (3, 3))
    assert unit(header).backward_input_s == (1, 1)
    assert unit(header, 1, 3).backward_weight_s == (1.5, 1.5)
    with pytest.raises(PlanError, match=r"backward = input \+ weight"):
        unit(header, 1, 5, input=2, weight=4)


def test_a_message_takes_latency_plus_bytes_over_the_bandwidth_of_the_level_it_crosses():
    cost = CostModel((1, 1), (1, 1), (1, 1), act_bytes=(20, 0), grad_bytes=(10, 0), topology=SERVER)
    assert cost.message_s(Instruction(Op.SEND, 0, 0, kind="act", peer=1), 0) == 0.5 + 20 / 5
    assert cost.message_s(Instruction(Op.SEND, 0, 0, kind="act", peer=2), 1) == 3 + 20 / 2
    assert cost.message_s(Instruction(Op.SEND, 0, 0, kind="grad", peer=0), 1) == 0.5 + 10 / 5


@pytest.mark.parametrize(("d", "ring", "tree"), [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 3, 2), (5, 4, 3), (8, 7, 3)])
@pytest.mark.parametrize("size", [6, 6000])
def test_a_reduction_takes_the_faster_of_ring_and_tree(d, ring, tree, size):
    cost = CostModel((1,), (1,), (1,), weight_bytes=(size,), bandwidth_bytes_per_s=3, latency_s=7)
    replicas = Instruction(Op.REDUCE, 0, version=0, kind="replicas")
    by_ring, by_tree = 2 * (ring * 7 + (d - 1) / d * size / 3), 2 * (tree * 7 + (d > 1) * size / 3)
    assert cost.reduce_s(replicas, range(d)) == pytest.approx(min(by_ring, by_tree))
    assert cost.reduce_s(Instruction(Op.REDUCE, version=0, kind="norm"), range(d)) == 2 * tree * 7


def test_members_in_one_server_leave_it_through_a_link_each_unless_they_share_a_port():
    weights = {"forward_s": (1,), "backward_input_s": (1,), "backward_weight_s": (1,), "weight_bytes": (60,)}
    replicas = Instruction(Op.REDUCE, 0, version=0, kind="replicas")
    server, rack = Level("server", 4, 100.0), Level("rack", 2, 5.0)
    wide = CostModel(**weights, topology=Topology((server, rack)))
    shared = CostModel(**weights, topology=Topology((server, msgspec.structs.replace(rack, one_port=True))))
    assert wide.reduce_s(replicas, range(8)) == pytest.approx(2 * 7 / 8 * 60 / (4 * 5))
    assert shared.reduce_s(replicas, range(8)) == pytest.approx(2 * 7 / 8 * 60 / 5)
    assert wide.reduce_s(replicas, (0, 4)) == shared.reduce_s(replicas, (0, 4)) == 60 / 5


def test_a_reduction_goes_at_the_pace_of_its_slowest_link():
    cost = CostModel((1,), (1,), (1,), weight_bytes=(60,), topology=SERVER)
    replicas = Instruction(Op.REDUCE, 0, version=0, kind="replicas")
    assert cost.reduce_s(replicas, (0, 1)) == 60 / 5 + 2 * 0.5
    assert cost.reduce_s(replicas, (1, 2)) == 60 / 2 + 2 * 3


def test_a_tied_weight_is_reduced_alone():
    cost = CostModel((1, 1), (1, 1), (1, 1), weight_bytes=(60, 60), tied_bytes={0: 6}, bandwidth_bytes_per_s=1)
    assert cost.reduce_s(Instruction(Op.REDUCE, 0, version=0, kind="tied"), (0, 1)) == 6
    assert cost.reduce_s(Instruction(Op.REDUCE, 1, version=0, kind="tied"), (0, 1)) == 60


def test_a_copy_goes_at_the_pace_of_its_tier():
    cost = CostModel((1,), (1,), (1,), weight_bytes=(60,), tiers=(Tier("host", 1e9, 20, 30, 1),))
    assert cost.local_s(Instruction(Op.FETCH, 0, version=0, kind="weights", tier="host"), 0) == 1 + 60 / 20
    assert cost.local_s(Instruction(Op.EVICT, 0, version=0, kind="weights", tier="host"), 0) == 1 + 60 / 30
    with pytest.raises(PlanError, match="'disk'"):
        cost.local_s(Instruction(Op.FETCH, 0, version=0, kind="weights", tier="disk"), 0)


def test_issuing_costs_the_rank_posts_copies_and_overhead():
    cost = CostModel((1,), (1,), (1,), act_bytes=(10,), post_s=2, copy_s_per_byte=3, overhead_s=4)
    assert cost.duration_s(Instruction(Op.SEND, 0, 0, kind="act", peer=1), 0) == 2 + 3 * 10
    assert cost.duration_s(Instruction(Op.RECV, 0, 0, kind="act", peer=1), 0) == 2
    assert cost.duration_s(fwd(0, 0), 0) == 1 + 4
    assert cost.duration_s(Instruction(Op.DROP, 0, version=0), 0) == 0


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"forward_s": ()}, "at least one stage"),
        ({"step_s": (1, 2)}, "step_s: expected 1 figures"),
        ({"act_bytes": (-1,)}, "act_bytes"),
        ({"latency_s": -1}, "latency_s: expected 0 or more, got -1"),
        ({"speed": (0,)}, "speed: expected more than 0"),
    ],
)
def test_figures_that_make_no_sense_are_refused_by_name(figures, message):
    with pytest.raises(PlanError, match=message):
        CostModel(**{"forward_s": (1,), "backward_input_s": (1,), "backward_weight_s": (1,), **figures})


# ----------------------------------------------------------------------------------------------------------- profiles


def test_a_stage_costs_what_its_layers_cost():
    cost = of_plan(Profile("chain", 4, THREE, loss_s=1, optimizer_s=3000), by_counts(2, 1), SERVER, runtime=FREE)
    # The first stage's input needs no gradient, so its second half is all of its backward.
    assert (cost.forward_s, cost.backward_input_s, cost.backward_weight_s) == ((5, 7), (0, 8), (7 + 9, 9))
    assert (cost.saved_bytes, cost.weight_bytes, cost.optim_bytes) == ((300, 300), (3000, 3000), (6000, 6000))
    assert (cost.act_bytes, cost.grad_bytes, cost.step_s) == ((20, 30), (20, 30), (1500, 1500))
    assert cost.duration_s(Instruction(Op.LOSS, mb=0), 0) == 1


def test_what_crosses_a_cut_is_every_output_used_beyond_it_once():
    # a feeds b and c; the second cut is crossed by both a and b.
    graph = Profile("skip", 1, THREE, edges=((0, 1), (1, 2), (0, 2)))
    cost = of_plan(graph, by_counts(1, 1, 1), Topology.local(3))
    assert cost.act_bytes == (*graph.cut_bytes, 30)


def test_between_its_halves_a_backward_keeps_what_its_layers_keep_and_in_the_first_stage_its_gradient():
    known = tuple(msgspec.structs.replace(layer, half_bytes=7) for layer in THREE)
    for layers, kept in ((known, 14), (THREE, sum(max(x.output_bytes, x.saved_bytes) for x in THREE[1:]))):
        cost = of_plan(Profile("chain", 4, layers), by_counts(1, 2), SERVER)
        assert cost.half_bytes == (cost.grad_bytes[0], kept)


def test_a_frozen_stage_has_no_backward_and_only_weights_that_train_have_gradients_and_states():
    layers = [
        msgspec.structs.replace(layer, trained_bytes=trained, split_s=0.5, half_bytes=7.0)
        for layer, trained in zip(THREE, (0, 500, None), strict=True)
    ]
    profile = Profile("m", 1, tuple(layers), optimizer_s=7.0)
    cost = of_plan(profile, by_counts(1, 1, 1, frozen=1), Topology.local(3), runtime=FREE, state_per_weight=2.0)
    assert (cost.backward_input_s, cost.backward_weight_s) == ((0, 0, 8), (0, 5 + 6, 9))
    assert (cost.split_s, cost.half_bytes) == ((0, 0, 0.5), (0, 20, 7))
    assert cost.step_s == (0, 1, 6), "by the bytes that train"
    assert (cost.weight_bytes, cost.wgrad_bytes, cost.optim_bytes) == (
        (1000, 2000, 3000),
        (0, 500, 3000),
        (0, 1000, 6000),
    )
    assert cost.size_bytes(Value("wgrad", 1, 0)) == cost.held_bytes(Value("weights", 1, 3)) == 500
    assert [cost.frozen_bytes(stage) for stage in range(3)] == [1000, 1500, 0]
    wide = CostModel((1,), (1,), (1,), weight_bytes=(60,), wgrad_bytes=(6,), bandwidth_bytes_per_s=1)
    assert wide.reduce_s(Instruction(Op.REDUCE, 0, version=0, kind="replicas"), (0, 1)) == 6


def test_a_further_version_takes_the_bytes_of_what_trains():
    program = generate("pipedream-2bw", Shape(2, 2, num_steps=3))
    cost = CostModel((1, 1), (1, 1), (1, 1), weight_bytes=(100, 100), wgrad_bytes=(1, 1), act_bytes=(0, 0))
    assert simulate(program, cost).peak_bytes(0) == 99 + 2 + 1, "two versions and gradients of one part in a hundred"


def test_an_output_without_gradient_sends_none_back():
    layers = (Layer("tokens", 1, 0, 0, 10, 0, 0, grad_bytes=0), *THREE[1:])
    cost = of_plan(Profile("ids", 1, layers), by_counts(1, 2), Topology.local(2))
    assert (cost.act_bytes[0], cost.grad_bytes[0]) == (10, 0)


def test_another_microbatch_size_scales_time_and_data_but_not_weights():
    cost = of_plan(Profile("chain", 4, THREE), by_counts(3, microbatch_size=8), SERVER)
    assert (cost.forward_s, cost.saved_bytes, cost.act_bytes, cost.weight_bytes) == ((24,), (1200,), (60,), (6000,))


def test_unequal_devices_scale_a_stage_and_the_slowest_of_a_group_sets_its_pace():
    flops = (10, 10, 40, 20)
    fast = Topology((Level("server", 4, 5.0),), devices=tuple(Device(flops=each) for each in flops))
    cost = of_plan(Profile("chain", 1, THREE), by_counts(3, tensor=2), fast, runtime=FREE)
    assert cost.tensor == 2
    # Two devices make a rank, which is as fast as the slower of them.
    assert (cost.duration_s(fwd(0, 0), 0), cost.duration_s(fwd(0, 0), 1)) == (12, 6)


def test_replicas_that_shard_the_optimizer_step_and_keep_the_states_of_a_part_each():
    stages, placement = Partition((StageSpec((0, 1, 2)),)), Placement(((0, 1),))
    profile = Profile("chain", 1, THREE, optimizer_s=12)
    whole, parts = (
        of_plan(profile, Plan(stages, placement, "data-parallel", 2, data=2, shard=shard), SERVER)
        for shard in ("none", "optimizer")
    )
    assert (whole.step_s, whole.optim_bytes) == ((12,), (12000,))
    assert (parts.step_s, parts.optim_bytes) == ((6,), (6000,))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("idle", "last", "early", "late"),
    [
        # Half of 6 MiB fills a bucket, so one is full when the backward reaches b, and so is the other at the end.
        ((0, 0, 0), 30 + 2.25 * MIB, 4.5 * MIB, 0),
        # The first bucket has a weight without a gradient: no sum begins.
        ((0, 0, 4), 40, 0, 4.5 * MIB),
        # The second one has it.
        ((4, 0, 0), 30 + 2.25 * MIB, 2.25 * MIB, 2.25 * MIB),
    ],
)
def test_a_backward_begins_the_sums_of_the_buckets_that_it_fills(idle, last, early, late):
    sizes = zip("abc", (2, 1, 3), idle, strict=True)
    layers = [
        Layer(name, 1, 1, 1, 0, 10, size * MIB, backward_work_bytes=10, idle_bytes=none) for name, size, none in sizes
    ]
    # Three of four copies send their terms.
    found = work_of(layers, 0, 0, 0, received=0.75)
    saved = 30
    assert found["backward work"] == 40 - saved
    assert found["last work"] == last - saved
    assert (found["early sum work"], found["sum work"]) == (early, late)


def test_a_stage_widens_the_narrow_gradient_that_comes_for_its_last_layer():
    """Only the gradients between its own layers once had the size inside the stage."""
    work = {"forward_work_bytes": 0, "bare_work_bytes": 0, "first_work_bytes": 7, "backward_work_bytes": 5}
    layers = [Layer(name, 1, 1, 1, 20, 100, 0, inner_bytes=40, **work) for name in "ab"]
    found = work_of(layers, act=20, grad=20, entering=0)
    assert (found["backward work"], found["first work"]) == (40 + 5, 40 + 7)


def test_ranks_of_a_machine_share_its_tiers_and_step_on_the_host_as_fast_as_it_can():
    host = Tier("host", 1e9, 20, 40, step_bytes_per_s=100)
    machine = msgspec.structs.replace(SERVER, tiers=(host,))
    plan = by_counts(2, 1, spill=SpillSpec("host", 1e9))
    cost = of_plan(Profile("chain", 1, THREE, optimizer_s=6), plan, machine)
    assert (cost.tiers[0].read_bytes_per_s, cost.tiers[0].write_bytes_per_s) == (10, 20)
    assert (cost.step_s, cost.host_step_s) == ((3, 3), (3000 / 50, 3000 / 50))
    assert of_plan(Profile("chain", 1, THREE, optimizer_s=6), plan, SERVER).host_step_s == (3, 3)


def test_the_executor_adds_what_it_was_measured_to_add():
    runtime = RuntimeCosts(1, 2, copy_s_per_byte=5)
    cost = of_plan(Profile("chain", 1, THREE), by_counts(1, 2), SERVER, runtime=runtime)
    assert (cost.overhead_s, cost.post_s, cost.copy_s_per_byte) == (1, 2, 5)


def test_partition_profile_and_topology_must_belong_together():
    profile = Profile("chain", 1, THREE)
    with pytest.raises(PlanError, match="2 layers, the profile 3"):
        of_plan(profile, by_counts(1, 1), SERVER)
    with pytest.raises(PlanError, match="5 ranks, the topology 4"):
        of_plan(profile, Plan(Partition((StageSpec((0, 1, 2), 5),)), Placement((tuple(range(5)),)), "1f1b", 5), SERVER)
    with pytest.raises(PlanError, match="needs a of the later stage"):
        back = Partition((StageSpec((1, 2)), StageSpec((0,))))
        of_plan(profile, Plan(back, Placement(((0,), (1,))), "1f1b", 4), SERVER)


def test_a_profiled_plan_simulates_from_end_to_end():
    cost = of_plan(Profile("chain", 1, THREE), by_counts(1, 2), Topology.local(2), state_per_weight=0, runtime=FREE)
    program = generate("1f1b", Shape(2, 4))
    timeline = simulate(program, cost)
    # Rank 1 is never idle after the first activation has come; before it and after it, rank 0 works alone.
    message_s = 100e-6 + 10 / 2e9
    assert timeline.makespan_s == pytest.approx(1 + 4 * (11 + 28) + 5 + 2 * message_s)
    # In a backward: weights and their gradients, what is saved, the gradients of output and input, the next input.
    assert timeline.peak_bytes(1) == 5000 + 5000 + 500 + 30 + 10 + 10
    assert len(timeline.events) == len(dependency_graph(program).instructions)
