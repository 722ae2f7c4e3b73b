"""Live values that the planner counts in a small program, compared with those of the whole one."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pipefit.cost import of_plan
from pipefit.ir.liveness import peak_inflight
from pipefit.ir.op import Op
from pipefit.ir.program import WeightRule
from pipefit.planner.bounds import quick_bytes
from pipefit.planner.candidate import plan_of
from pipefit.planner.estimate import estimate
from pipefit.planner.holdings import (
    collectives_of,
    first_holdings,
    holdings_of,
    least_in_flight,
    least_replayed,
    replayed,
)
from pipefit.planner.space import Config, Problem
from pipefit.schedules import Shape, find, generate, names, program_of
from pipefit.simulate import simulate
from pipefit.spec import Layer, Profile, Topology


def config(schedule: str, depth: int, chunks: int, microbatches: int, recompute: str = "none") -> Config:
    return Config(schedule, 1, depth, 1, chunks, 1, microbatches, recompute)


def highest(held) -> list[dict]:
    return [dict(zip(keys, rows.max(axis=0).tolist(), strict=True)) for keys, rows in held]


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule, depth, chunks", [("gpipe", 6, 1), ("breadth-first", 6, 2), ("breadth-first", 4, 4)])
def test_where_all_are_held_a_few_microbatches_give_the_values_of_many(monkeypatch, schedule, depth, chunks, recompute):
    whole = {m: holdings_of(config(schedule, depth, chunks, m, recompute), ()) for m in (3 * depth, 5 * depth)}
    monkeypatch.setattr("pipefit.planner.holdings._SMALL", 0)
    for m, expected in whole.items():
        found = holdings_of(config(schedule, depth, chunks, m, recompute), ())
        assert highest(found) == highest(expected)
        weights = np.random.default_rng(0)
        for (_, counted), (_, held) in zip(found, expected, strict=True):
            sizes = weights.exponential(size=held.shape[1])
            assert (counted @ sizes).max() >= (held @ sizes).max() * (1 - 1e-12)


@pytest.mark.parametrize("depth", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", [name for name in names() if find(name).ahead])
def test_the_formula_of_a_schedule_gives_the_order_of_its_program(schedule, depth, chunks):
    own = find(schedule)
    if chunks > 1 and not own.chunks:
        return
    for microbatches in range(1, 3 * depth + 2):
        if own.weights is WeightRule.DOUBLE and microbatches < depth - 1:
            continue
        program = generate(schedule, Shape(depth, microbatches, chunks, 1 if own.is_synchronous else 3 * depth))
        for rank, instructions in enumerate(program.ranks):
            work = [i for i in instructions if i.op in (Op.FWD, Op.BWD)]
            first_backward = next(place for place, i in enumerate(work) if i.op is Op.BWD)
            last_forward = max(place for place, i in enumerate(work) if i.op is Op.FWD)
            ahead = Counter(i.stage for i in work[:first_backward])
            after = Counter(i.stage for i in work[last_forward + 1 :])
            stages = program.header.stages_of(rank)
            assert own.ahead(depth, microbatches, chunks, rank) == tuple(ahead[stage] for stage in stages)
            assert all(after[stage] <= ahead[stage] for stage in stages)
            if chunks == 1:
                assert peak_inflight(program, rank) <= ahead[stages[0]]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "breadth-first", "pipedream-2bw"])
@pytest.mark.parametrize("depth, chunks", [(3, 1), (4, 1), (3, 2), (2, 3)])
def test_a_rank_holds_and_replays_what_the_bounds_say_and_more(schedule, depth, chunks):
    if chunks > 1 and not find(schedule).chunks:
        return
    for microbatches in (depth, 2 * depth, 3 * depth):
        each = config(schedule, depth, chunks, microbatches)
        for count, held in zip(least_in_flight(each), highest(holdings_of(each, ())), strict=True):
            assert all(most >= count for (kind, _), most in held.items() if kind == "saved")
        for replays in ("none", "stage"):
            both = first_holdings(replace(each, recompute=replays)), holdings_of(replace(each, recompute=replays), ())
            for (least_keys, first), (keys, rows) in zip(*both, strict=True):
                columns = rows[:, [keys.index(key) for key in least_keys]]
                assert (columns >= first).all(axis=1).any()
        for least, share in zip(least_replayed(each), replayed(each), strict=True):
            assert least <= share


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    "schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("breadth-first", 3)]
)
def test_the_least_bytes_of_a_candidate_are_never_more_than_it_needs(schedule, chunks, recompute):
    # Gradients as large as the values of eight micro-batches: where both are not held at once, it shows.
    layers = tuple(Layer(f"layer{n}", 1e-3, 1e-3, 1e-3, 1e2, 1e3, 8e3) for n in range(24))
    problem = Problem(Profile("made", 1, layers), Topology.local(6), 8, 2.0)
    for depth in (2, 3, 6):
        for microbatches in (depth, 2 * depth, 4 * depth):
            each = config(schedule, depth, chunks, microbatches, recompute)
            assert quick_bytes(problem, each) <= max(estimate(problem, each).peak_bytes)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule, microbatches", [("1f1b", 3), ("1f1b", 12), ("gpipe", 2), ("gpipe", 12)])
def test_the_work_of_layers_counts_as_in_the_simulation(monkeypatch, schedule, microbatches, recompute):
    layers = []
    for index in range(6):
        work = {"forward_work_bytes": 90.0 + index, "bare_work_bytes": 50.0, "backward_work_bytes": 30.0 * index,
                "first_work_bytes": 70.0, "step_work_bytes": 11.0 * index}  # fmt: skip
        layers.append(Layer(f"layer{index}", 1, 1, 1, 10 + index, 40 + index, 60, input_bytes=10.0, **work))
    profile = Profile("m", 1, tuple(layers), loss_s=0.1, optimizer_s=1, loss_work_bytes=200.0, step_work_bytes=60.0)
    topology = Topology.local(3, 1e12, 0.0)
    problem = Problem(profile, topology, microbatches, 2.0)
    found = estimate(problem, config(schedule, 3, 1, microbatches, recompute))
    plan = plan_of(problem, found.config, found.partition)
    cost = of_plan(profile, plan, topology, state_per_weight=2.0)
    timeline = simulate(program_of(plan), cost)
    peaks = [timeline.peak_bytes(rank) for rank in range(3)]
    assert found.peak_bytes == pytest.approx(peaks, rel=0.02)
    assert quick_bytes(problem, found.config) <= max(found.peak_bytes)
    # Of few micro-batches, with growth.
    monkeypatch.setattr("pipefit.planner.holdings._SMALL", 0)
    again = estimate(Problem(profile, topology, microbatches, 2.0), found.config)
    assert again.peak_bytes == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    "schedule, depth, chunks", [("data-parallel", 1, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("interleaved", 4, 2)]
)
def test_stages_that_all_have_room_are_gathered_and_summed_once_per_update(schedule, depth, chunks):
    """Of many micro-batches, those of a part of the program were once multiplied."""
    for shard in ("gradients", "weights"):
        for count in (32, 4096):
            asked = replace(config(schedule, depth, chunks, count), data=2, shard=shard)
            assert collectives_of(asked) == [(1.0, 1.0)] * (depth * chunks)
