"""Live values that the planner counts in a small program, compared with those of the whole one."""

import numpy as np
import pytest

from pipefit.planner.bounds import quick_bytes
from pipefit.planner.estimate import estimate
from pipefit.planner.holdings import holdings_of, least_holdings, least_in_flight
from pipefit.planner.space import Config, Problem
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


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first"])
@pytest.mark.parametrize("depth", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_rank_with_several_stages_holds_what_the_bound_says_and_more(schedule, depth, chunks, recompute):
    for microbatches in (depth, 2 * depth, 3 * depth):
        each = config(schedule, depth, chunks, microbatches, recompute)
        for (least_keys, least), (keys, rows) in zip(least_holdings(each), holdings_of(each, ()), strict=True):
            columns = rows[:, [keys.index(key) for key in least_keys]]
            assert (columns >= least).all(axis=1).any()


@pytest.mark.parametrize("depth", [2, 4, 7])
def test_1f1b_holds_as_many_as_there_are_ranks_below(depth):
    each = config("1f1b", depth, 1, 3 * depth)
    saved = [
        max(count for (kind, _), count in held.items() if kind == "saved") for held in highest(holdings_of(each, ()))
    ]
    assert saved == least_in_flight(each) == list(range(depth, 0, -1))


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
