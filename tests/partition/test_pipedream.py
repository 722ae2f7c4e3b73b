import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition import brute_force
from tests.partition.cases import bandwidths, chain, conventions, profiles, topology

from pipefit.errors import PlanError
from pipefit.partition import pipedream

pytestmark = pytest.mark.slow

# These cases take milliseconds each, and the rules differ in rare ones.
MANY = settings(max_examples=max(settings().max_examples, 150))


def search(profile, levels, convention, **options):
    kind = "flat" if len(levels) == 1 else "hierarchical"
    return pipedream(profile, topology(*levels), cost=convention, search=kind, margin=0.0, **options)


def assert_sound(profile, result):
    """Stages hold every layer once and data only flows forward."""
    if result.partition is None:
        assert math.isinf(result.time_s) and result.why
        return
    owner = {layer: index for index, stage in enumerate(result.partition.stages) for layer in stage.layers}
    assert sorted(owner) == list(range(len(profile)))
    assert all(owner[tail] <= owner[head] for tail, head in profile.links)
    assert len(result.in_flight) == len(result.memory_bytes) == len(result.partition.stages)


def cost_of(profile, levels, convention, result):
    """The time of the stages that were returned, by the enumeration's formulas."""

    def plan(stages, done):
        found = []
        for stage in stages:
            end = done | set(stage.layers)
            found.append((frozenset(done), frozenset(end), stage.replicas, plan(stage.stages, done) or None))
            done = end
        return tuple(found)

    everything = frozenset(range(len(profile)))
    return brute_force.cost(
        profile, levels, convention, plan(result.levels, set()), len(levels), frozenset(), everything
    )


@MANY
@given(profiles(4), conventions, st.sampled_from([1, 2, 3, 4, 5, 5]), bandwidths, st.booleans())
def test_flat_search_equals_enumeration_in_time_and_fewest_stages(profile, convention, width, bandwidth, straight):
    levels = [(width, bandwidth)]
    time_s, num_stages = brute_force.best(profile, levels, convention, straight)
    result = search(profile, levels, convention, straight=straight)
    assert result.search_s == pytest.approx(time_s, rel=1e-9)
    assert_sound(profile, result)
    if result.partition and result.shape == "flat":
        assert len(result.levels) == num_stages
        assert cost_of(profile, levels, convention, result) == pytest.approx(result.time_s, rel=1e-9)


@MANY
@given(profiles(4), conventions, st.sampled_from([(2, 2), (3, 2), (2, 3)]), bandwidths, bandwidths)
def test_two_levels_equal_enumeration(profile, convention, widths, inner, outer):
    levels = list(zip(widths, (inner, outer), strict=True))
    time_s, num_stages = brute_force.best(profile, levels, convention)
    result = search(profile, levels, convention)
    assert result.search_s == pytest.approx(time_s, rel=1e-9)
    assert_sound(profile, result)
    if result.partition and result.shape == "hierarchical":
        assert len(result.levels) == num_stages
        assert cost_of(profile, levels, convention, result) == pytest.approx(result.time_s, rel=1e-9)


@MANY
@given(profiles(3), conventions, bandwidths, bandwidths, bandwidths)
def test_three_levels_equal_enumeration(profile, convention, first, second, third):
    levels = [(2, first), (2, second), (2, third)]
    time_s, _ = brute_force.best(profile, levels, convention)
    assert search(profile, levels, convention).search_s == pytest.approx(time_s, rel=1e-9)


@MANY
@given(profiles(4), conventions, st.integers(1, 4), bandwidths, st.integers(1, 120), st.booleans())
def test_flat_search_under_a_memory_limit_equals_enumeration(profile, convention, width, bandwidth, limit, stashing):
    levels = [(width, bandwidth)]
    versions, state = (1.0, 2.0) if stashing else (0.0, 3.0)
    time_s, _ = brute_force.best(profile, levels, convention, limit=limit, versions=versions, state=state)
    result = search(profile, levels, convention, memory_bytes=limit, weight_versions=stashing)
    assert result.search_s == pytest.approx(time_s, rel=1e-9)
    assert_sound(profile, result)
    assert all(needed <= limit for needed in result.memory_bytes)


@MANY
@given(profiles(4), conventions, bandwidths, bandwidths, st.integers(1, 120))
def test_two_levels_under_a_memory_limit_fit_and_are_never_better_than_enumeration(
    profile, convention, inner, outer, limit
):
    levels = [(2, inner), (2, outer)]
    time_s, _ = brute_force.best(profile, levels, convention, limit=limit)
    result = search(profile, levels, convention, memory_bytes=limit)
    assert all(needed <= limit for needed in result.memory_bytes)
    if convention == "pipedream-code":
        assert result.search_s == pytest.approx(time_s, rel=1e-9)
    else:  # servers behind a stage count with all their devices, used or not
        assert result.search_s >= time_s * (1 - 1e-9)


@given(profiles(5), conventions, st.integers(1, 4), bandwidths)
def test_same_input_gives_the_same_partition(profile, convention, width, bandwidth):
    levels = [(width, bandwidth)]
    assert search(profile, levels, convention) == search(profile, levels, convention)


@given(st.integers(0, 2**31), conventions, st.sampled_from([4, 8]))
@settings(max_examples=6)
def test_bounds_and_blocks_of_long_chains_lose_nothing(seed, convention, width):
    """Above 200 states a coarse search bounds the fine one, and pairs are joined by blocks."""
    import random

    from pipefit.partition.conventions import CONVENTIONS
    from pipefit.partition.down_sets import find_states
    from pipefit.partition.dynamic_program import all_pairs
    from pipefit.partition.stage_costs import CutProblem

    rng = random.Random(seed)
    n = 230
    figures = [[rng.choice([0, 1, rng.random() * 9]) for _ in range(n)] for _ in range(3)]
    profile = chain(*figures)
    states = find_states(profile)
    problem = CutProblem(states, [(width, 5.0), (2, 1.0)], CONVENTIONS[convention])
    table = all_pairs(problem, 1, 0)
    flat = pipedream(profile, topology((width, 5.0)), cost=convention, search="flat", margin=0.0)
    assert table[0, -1] == pytest.approx(flat.search_s, rel=1e-9)


def test_equally_fast_partitions_go_to_fewer_stages_then_to_the_earliest_cuts():
    even = chain([4, 4, 4, 4])
    assert search(even, [(4, math.inf)], "ring").configuration == "4"
    uneven = search(chain([8, 1, 1, 1, 1]), [(3, math.inf)], "ring", straight=True)
    assert [stage.layers for stage in uneven.partition.stages] == [(0,), (1, 2, 3, 4)]
    three = search(chain([1, 1, 6, 1, 1]), [(3, math.inf)], "ring", straight=True)
    assert [stage.layers for stage in three.partition.stages] == [(0,), (1, 2, 3, 4)] or three.time_s == 6
    assert [len(stage.layers) for stage in three.partition.stages] == [2, 1, 2]


def test_plain_data_parallelism_is_preferred_inside_the_margin_only():
    profile = chain([10, 10, 10, 10], weights=[0, 0, 0, 1.0])  # 17.5 s as 4, 10 s as 3-1
    levels = topology((4, 0.1))
    hybrid = pipedream(profile, levels, cost="pipedream-code", margin=0.74)
    assert (hybrid.configuration, hybrid.shape) == ("3-1", "hierarchical")
    plain = pipedream(profile, levels, cost="pipedream-code", margin=0.76)
    assert (plain.configuration, plain.shape) == ("4", "data parallel")
    assert plain.time_s == plain.data_parallel_s == pytest.approx(17.5)
    assert plain.search_s == hybrid.time_s == pytest.approx(10.0)


def test_what_fits_nowhere_is_an_answer_that_says_what_is_missing():
    result = pipedream(chain([1, 1], weights=[10, 1]), topology((2, 1.0)), memory_bytes=20)
    assert result.partition is None and result.configuration == "none"
    assert "layer 0 (layer0) needs 30 B" in result.why and "20 B" in result.why


def test_flat_search_finds_what_levels_cannot():
    """15-1 on 4 × 4: a stage of the upper level owns whole servers, so only the flat search can give it."""
    profile = chain([15, 1], weights=[0, 1e9])
    result = pipedream(profile, topology((4, 1e3), (4, 1e3)))
    assert (result.shape, result.configuration) == ("flat", "15-1")
    assert result.hierarchical_s > result.flat_s == pytest.approx(1.0)


def test_in_flight_counts_are_noam():
    result = pipedream(chain([15, 1], weights=[0, 1e9]), topology((16, 1e3)))
    assert result.in_flight == (2, 1)


def test_wide_graphs_are_cut_along_orders_and_say_so():
    from pipefit.spec import Layer, Profile

    width, depth = 12, 8
    layers = [Layer("source", 1, 1, 1, 1, 1, 1)]
    edges = []
    for branch in range(width):
        for step in range(depth):
            index = len(layers)
            edges.append((0 if step == 0 else index - 1, index))
            layers.append(Layer(f"b{branch}.{step}", 1, 1, 1, 1, 1, 1))
    sink = len(layers)
    edges += [(1 + branch * depth + depth - 1, sink) for branch in range(width)]
    layers.append(Layer("sink", 1, 1, 1, 1, 1, 1))
    profile = Profile("wide", 1, tuple(layers), tuple(edges))
    result = pipedream(profile, topology((4, 1e9), (2, 1e9)), cost="pipedream-code")
    assert not result.exact
    assert_sound(profile, result)
    assert result.time_s == pytest.approx(sum(layer.total_s for layer in profile.layers) / 8, rel=0.05)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(PlanError, match="did you mean ring"):
        pipedream(chain([1]), topology((1, 1.0)), cost="rng")
    with pytest.raises(PlanError, match="hierarchical"):
        pipedream(chain([1]), topology((1, 1.0)), search="deep")
    with pytest.raises(PlanError, match="margin"):
        pipedream(chain([1]), topology((1, 1.0)), margin=-1)


def test_ring_shares_a_cut_between_the_replicas_of_both_sides():
    result = search(chain([10, 10], outputs=[5, 0], weights=[10, 10]), [(4, 1.0)], "ring")
    assert (result.configuration, result.time_s) == ("2-2", 5.0)
    printed = search(chain([10, 10], outputs=[5, 0], weights=[5, 5]), [(4, 1.0)], "paper")
    assert (printed.configuration, printed.time_s) != ("2-2", 5.0)


def test_released_optimizer_charges_the_last_stage_of_a_server_for_what_leaves_it():
    profile = chain([4, 4, 4, 4], outputs=[0, 3, 0, 0], weights=[50, 50, 50, 50])
    result = search(profile, [(2, 1.0), (2, 10.0)], "pipedream-code")
    assert (result.configuration, result.time_s) == ("1-1-1-1", 6.0)
    assert search(profile, [(2, 1.0), (2, 10.0)], "ring").time_s == 4.0


def test_the_loss_is_paid_by_the_last_stage():
    from msgspec.structs import replace

    profile = replace(chain([4, 4, 2, 2]), loss_s=4.0)
    result = search(profile, [(2, 1.0)], "ring", straight=True)
    assert [len(stage.layers) for stage in result.partition.stages] == [2, 2] and result.time_s == 8.0
