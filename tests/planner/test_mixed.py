"""Devices of unequal speed: how they are named, planned for, refused and shown."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from pipefit.errors import PlanError
from pipefit.planner import plan
from pipefit.planner.candidate import costs_of, plan_of
from pipefit.planner.estimate import estimate
from pipefit.planner.explain import explain
from pipefit.planner.machines import read_profile
from pipefit.planner.methods import problem_of
from pipefit.planner.simulated import simulated, update_s
from pipefit.planner.space import Config
from pipefit.spec import Device, Layer, Level, Profile, Topology

FAST, SLOW = Device(flops=3e12), Device(flops=1e12)


def machine(*devices: Device) -> Topology:
    return Topology((Level("machine", len(devices), 1e12),), devices=devices)


def even(num_layers: int = 8, t: float = 1e-3) -> Profile:
    return Profile("even", 1, tuple(Layer(f"layer{i}", t, t, t, 0.0, 0.0, 0.0) for i in range(num_layers)))


def test_a_list_of_devices_needs_no_other_device(tmp_path):
    """A profile by arithmetic was once refused for the FLOP/s of a device that nobody had to give."""
    text = (
        'format = "pipefit.topology/1"\n[[levels]]\nname = "desk"\nwidth = 2\nbandwidth_bytes_per_s = "10 GB/s"\n'
        '[[devices]]\nflops = "300 TFLOP/s"\n[[devices]]\nflops = "100 TFLOP/s"\n'
    )
    found = Topology.parse(text)
    assert found.device == found.devices[0] and found.device.flops == 300e12
    assert Topology.load(found.save(tmp_path / "desk.toml")) == found
    profile = read_profile("gpt:layers=12,hidden=2048,heads=16", found, 1)
    made = plan(profile, found, global_batch=8, depths=[2], schedules=["1f1b"])
    first, last = made.partition.stages
    assert sum(profile.layers[i].total_s for i in first.layers) > sum(profile.layers[i].total_s for i in last.layers)


def test_pipedream_refuses_devices_that_differ_in_speed():
    with pytest.raises(PlanError, match=r"equally fast, got some that are 3 × as fast as others; use method auto"):
        plan(even(), machine(FAST, SLOW), method="pipedream")
    assert plan(even(), machine(SLOW, SLOW), method="pipedream").schedule


def test_gpipe_takes_the_least_variance_of_the_seconds_on_each_device():
    made = plan(even(), machine(FAST, SLOW), method="gpipe", global_batch=16)
    assert [len(stage.layers) for stage in made.partition.stages] == [6, 2]


def test_the_table_shows_the_times_of_the_devices_themselves():
    made = plan(even(), machine(FAST, SLOW), global_batch=16, depths=[2], schedules=["1f1b"])
    assert [len(stage.layers) for stage in made.partition.stages] == [6, 2]
    text = explain(made, even(), 120, topology=machine(FAST, SLOW))
    rows = [line.split() for line in text.splitlines()[3:5]]
    assert [row[6:10] for row in rows] == [["6", "ms", "12", "ms"]] * 2


def test_copies_of_a_stage_on_unequal_devices_are_shown_from_the_fastest_to_the_slowest():
    made = plan(even(), machine(FAST, SLOW), global_batch=16, microbatch_sizes=[1], depths=[1])
    row = explain(made, even(), 120, topology=machine(FAST, SLOW)).splitlines()[3]
    assert "8 ms…24 ms" in row and "16 ms…48 ms" in row


def splits(copies: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to give some copies at least one micro-batch each."""
    for cuts in combinations(range(1, count), copies - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, count)))


@pytest.mark.parametrize(("devices", "depth"), [((FAST, SLOW, SLOW), 1), ((FAST, FAST, SLOW, SLOW), 2)])
def test_no_split_of_the_batch_is_faster_than_the_shares_of_a_plan(devices, depth):
    topology = machine(*devices)
    count = 11
    made = plan(even(), topology, global_batch=count, microbatch_sizes=[1], depths=[depth], schedules=["gpipe"])
    assert made.shares and sum(made.shares) == count
    problem = problem_of(even(), topology, count, None)
    seconds = {}
    for shares in splits(len(devices) // depth, count):
        one = Config("gpipe", len(shares), depth, 1, 1, 1, count, shares=shares)
        if depth == 1:
            one = replace(one, schedule="data-parallel")
        found = estimate(problem, one)
        timing, _ = costs_of(problem, one, found.partition)
        _, period_s = update_s(plan_of(problem, one, found.partition), timing)
        assert found.period_s <= period_s + 1e-12
        seconds[shares] = simulated(problem, found).period_s
    assert made.prediction.period_s == pytest.approx(min(seconds.values()))
    assert "which take" in explain(made, even(), 120, topology=topology)


def test_devices_that_are_alike_get_no_shares():
    made = plan(even(), machine(SLOW, SLOW), global_batch=4, microbatch_sizes=[1], depths=[1])
    assert made.shares == () and made.data == 2
