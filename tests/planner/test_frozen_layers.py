"""Layers at the beginning that do not train are cheap, and the planner gives their stages more of them."""

import msgspec
import pytest
from tests.planner.cases import model

from pipefit.ir.liveness import lifetimes, peak
from pipefit.partition import hydra, pipedream
from pipefit.partition.capacity import shard_bytes
from pipefit.planner import plan
from pipefit.planner.bounds import quick_s
from pipefit.planner.candidate import costs_of, plan_of
from pipefit.planner.estimate import estimate, of_cut_s
from pipefit.planner.explain import explain
from pipefit.planner.methods import problem_of
from pipefit.planner.simulated import simulated
from pipefit.planner.space import Config
from pipefit.schedules import find, program_of
from pipefit.simulate import simulate
from pipefit.spec import Device, Layer, Level, Plan, Profile, Topology
from pipefit.verify import verify

SHAPES = [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("breadth-first", 2, 2), ("zb-h1", 4, 1)]


def counts(made: Plan) -> list[int]:
    return [len(stage.layers) for stage in made.partition.stages]


def planned(profile: Profile, **wishes: object) -> Plan:
    return plan(profile, Topology.local(4), global_batch=64, **{"depths": [4], "schedules": ["1f1b"]} | wishes)


def test_stages_of_frozen_layers_get_more_layers_and_the_plan_says_that_they_are_frozen():
    whole, frozen = planned(model(12)), planned(model(12, frozen=6))
    assert counts(frozen)[0] > counts(whole)[0] and frozen.frozen == 1 and whole.frozen == 0
    assert frozen.prediction.period_s < whole.prediction.period_s
    assert frozen.prediction.peak_bytes[0] < whole.prediction.peak_bytes[0]
    assert "4 stages (the first frozen)" in explain(frozen) and "frozen" not in explain(whole)
    assert program_of(frozen).header.frozen == 1 and verify(program_of(frozen)).ok


def test_of_twelve_equal_layers_with_six_frozen_the_first_of_four_devices_gets_six():
    def chain(frozen: int) -> Profile:
        def layer(index: int) -> Layer:
            times = 1e-3, 1e-3 * (index > frozen), 1e-3 * (index >= frozen)
            return Layer(f"layer{index}", *times, 1e4, 4e4, 1e6, trained_bytes=1e6 * (index >= frozen))

        return Profile("twelve", 1, tuple(map(layer, range(12))))

    assert counts(planned(chain(0))) == [3, 3, 3, 3]
    assert counts(planned(chain(6))) == [6, 2, 2, 2]


def test_a_frozen_stage_replays_nothing_and_is_cut_so():
    made = planned(model(12, frozen=6), recompute="stage")
    assert [stage.recompute for stage in made.partition.stages] == ["none", "stage", "stage", "stage"]
    assert counts(made)[0] >= counts(planned(model(12, frozen=6), recompute="none"))[0]


@pytest.mark.parametrize(("schedule", "depth", "chunks"), SHAPES)
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("frozen", [3, 5])
def test_bounds_of_frozen_layers_are_never_above_what_the_simulator_says(schedule, depth, chunks, recompute, frozen):
    problem = problem_of(model(8, frozen=frozen), Topology((Level("rack", depth, 2e9, 1e-4),)), 96)
    config = Config(schedule, 1, depth, 1, chunks, 2, 48, recompute)
    estimated = estimate(problem, config)
    found_s = simulated(problem, estimated).period_s
    assert 0.6 * found_s <= estimated.period_s <= found_s
    made = plan_of(problem, config, estimated.partition)
    _, cost = costs_of(problem, config, estimated.partition)
    for rank, need in enumerate(estimated.peak_bytes):
        program = program_of(made)
        own = program.header.stages_of(rank)
        held = peak(lifetimes(program, rank), cost.held_bytes) + sum(map(cost.frozen_bytes, own))
        assert need == pytest.approx(held + cost.resident_bytes(own), rel=0.25) and need >= held * (1 - 1e-9)
    assert made.frozen in (1, 2) or find(schedule).chunks


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first"])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("second_s", [1e-3, 4e-3])
def test_bounds_of_looped_schedules_count_no_replay_that_frozen_stages_make_unnecessary(schedule, count, second_s):
    """Without a backward of a rank's first stage in between, one of its second stage may follow its forward at once."""
    layers = [Layer(name, t, 0.0, 0.0, 1, 0, 1, trained_bytes=0.0) for name, t in (("a", 1e-3), ("b", second_s))]
    layers += [Layer("c", 3e-3, 3e-3, 3e-3, 1, 1, 1), Layer("d", 5e-4, 5e-4, 5e-4, 1, 1, 1)]
    problem = problem_of(Profile("few", 1, tuple(layers)), Topology((Level("rack", 2, 1e12),)), count)
    config = Config(schedule, 1, 2, 1, 2, 1, count, "stage")
    estimated = estimate(problem, config)
    made, (timing, _) = plan_of(problem, config, estimated.partition), costs_of(problem, config, estimated.partition)
    ends = simulate(program_of(made), timing, repeats=16, steps_only=True).step_ends_s
    update_s = max(float(ends[-1] - ends[7]) / 8, float(ends[-1]) / 16)
    for bound_s in (quick_s(problem, config), of_cut_s(problem, config), estimated.period_s):
        assert bound_s <= update_s * (1 + 1e-9)


def test_a_large_program_with_frozen_layers_is_extrapolated_as_it_is_simulated():
    profile, topology = model(8, frozen=4), Topology((Level("rack", 4, 2e9, 1e-4),))
    times = []
    for count in (90, 800):  # the first is simulated whole
        problem = problem_of(profile, topology, 2 * count)
        config = Config("1f1b", 1, 4, 1, 1, 2, count)
        times.append(simulated(problem, estimate(problem, config)).period_s / count)
    assert times[1] == pytest.approx(times[0], rel=0.04)


def test_versions_and_states_are_counted_of_what_trains():
    """A model whose weights are nearly all frozen, as with adapters: a further version of it takes next to nothing."""
    whole = model(8, weights=1e8)
    layers = [msgspec.structs.replace(layer, trained_bytes=1e4) for layer in whole.layers]
    adapted = msgspec.structs.replace(whole, layers=tuple(layers))
    topology = Topology((Level("rack", 2, 2e9, 1e-4),), Device(memory_bytes=1e12))
    peaks = [
        max(plan(one, topology, method="2bw", depths=[2], global_batch=16).prediction.peak_bytes)
        for one in (whole, adapted)
    ]
    weights = [sum(layer.weight_bytes for layer in adapted.layers[a:b]) for a, b in ((0, 4), (4, 8))]
    assert peaks[1] < 1.1 * max(weights) < peaks[0] / 3
    assert shard_bytes(adapted, 0, 8) < 0.3 * shard_bytes(whole, 0, 8)
    assert len(hydra(adapted, 7e8).stages) < len(hydra(whole, 7e8).stages)
    small = Topology((Level("rack", 2, 2e9, 1e-4),), Device(memory_bytes=6e8))
    assert pipedream(whole, small).partition is None and pipedream(adapted, small).partition is not None
