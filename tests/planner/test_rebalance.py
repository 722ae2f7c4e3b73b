"""The policy by which layers move: random times of a run's stages in, moves out."""

import random
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.planner import by_hand
from pipefit.planner.rebalance import LEAST_GAIN, Move, Rebalance, Window, changes
from pipefit.planner.running_costs import RunningCosts
from pipefit.spec import Layer, Plan, Profile, Topology
from pipefit.timeline.stage_seconds import middle

WINDOW, STEPS, RANKS = 8, 480, 3
OUTLIER = 20.0

Slowness = Callable[[int, int], float]
"""From a step and a rank to the factor of its seconds."""


class World(NamedTuple):
    """A machine that the policy does not see: the true costs of layers, speeds, noise of each step, and bad steps.

    Attributes:
        assumed: costs of the layers by the profile.
        true: their costs.
        slowness: of the ranks.
        noise: standard deviation of the logarithm of each time.
        bad: the share of the times that are an outlier.
        copies: of the pipeline.
    """

    assumed: list[float]
    true: list[float]
    slowness: Slowness
    noise: float = 0.0
    bad: float = 0.0
    copies: int = 1


def world(seed: int, slowness: Slowness, error: float = 0.05, noise: float = 0.05, bad: float = 0.02) -> World:
    draw = random.Random(seed)
    assumed = [draw.uniform(1, 3) for _ in range(9)]
    true = [cost * draw.lognormvariate(0, error) for cost in assumed]
    return World(assumed, true, slowness, noise, bad)


def policy_of(one: World, is_measured: bool = True) -> Rebalance:
    layers = (Layer(f"layer {i}", cost / 3, cost / 3, cost / 3, 0, 0, 8) for i, cost in enumerate(one.assumed))
    profile = Profile("model", 1, tuple(layers))
    ranks = RANKS * one.copies
    plan = by_hand(
        len(one.assumed), num_ranks=ranks, schedule="1f1b", num_microbatches=8, replicas=(one.copies,), profile=profile
    )
    return Rebalance(plan, profile, Topology.local(ranks, 1e12, 0.0), is_measured)


def seconds(one: World, plan: Plan, step: int, draw: random.Random) -> dict[tuple[int, int], float]:
    """What the ranks measure in a step."""
    found = {}
    for stage, (spec, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        for rank in ranks:
            whole = sum(one.true[layer] for layer in spec.layers) * one.slowness(step, rank)
            whole *= draw.lognormvariate(0, one.noise)
            if draw.random() < one.bad:
                whole *= OUTLIER
            found[rank, stage] = whole
    return found


def train(policy: Rebalance, one: World, seed: int, steps: int = STEPS, build_s: float = 1.0) -> list[Move]:
    """The moves of a run."""
    draw = random.Random(seed)
    made = []
    passes: list[dict[tuple[int, int], float]] = []
    for step in range(1, steps + 1):
        passes.append(seconds(one, policy.plan, step, draw))
        if step % WINDOW:
            continue
        mids = {place: middle([{0: each[place]} for each in passes]) for place in passes[0]}
        times = {place: mid.seconds[0] for place, mid in mids.items()}
        noise = max(mid.noise for mid in mids.values())
        period_s = 10 * max(times.values())
        move = policy.look(Window(step, times, noise, period_s, steps - step, build_s))
        if move is not None:
            policy.moved(move)
            made.append(move)
        passes = []
    return made


def cut(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.layers for stage in plan.partition.stages)


def slowest(one: World, stages: tuple[tuple[int, ...], ...], step: int) -> float:
    return max(sum(one.true[i] for i in layers) * one.slowness(step, rank) for rank, layers in enumerate(stages))


def best(one: World, step: int) -> float:
    """The slowest stage of the best cut, by trying all."""
    count = len(one.true)
    found = []
    for a, b in combinations(range(1, count), 2):
        stages = (tuple(range(a)), tuple(range(a, b)), tuple(range(b, count)))
        found.append(slowest(one, stages, step))
    return min(found)


def even(step: int, rank: int) -> float:
    return 1.0


def slow_from(when: int, slow: int, times: float) -> Slowness:
    return lambda step, rank: times if rank == slow and step > when else 1.0


seeds = st.integers(0, 10**6)
noises = st.sampled_from([0.0, 0.02, 0.05, 0.1])


@settings(max_examples=25, deadline=None)
@given(seeds, noises)
def test_nothing_moves_while_nothing_changes_whatever_single_steps_do(seed, noise):
    one = world(seed, even, error=0.0, noise=noise, bad=0.05)
    assert train(policy_of(one), one, seed) == []


@settings(max_examples=25, deadline=None)
@given(seeds, noises, st.integers(0, RANKS - 1), st.floats(2.0, 6.0), st.integers(30, 200))
def test_a_lasting_change_is_answered_soon_and_the_new_cut_is_nearly_the_best(seed, noise, slow, times, when):
    one = world(seed, slow_from(when, slow, times), noise=noise)
    policy = policy_of(one)
    before = cut(policy.plan)
    made = train(policy, one, seed)
    lost = 1 - best(one, STEPS) / slowest(one, before, STEPS)
    if lost > 0.3:
        assert when < made[0].step <= when + 4 * WINDOW
    assert slowest(one, cut(policy.plan), STEPS) <= 1.3 * best(one, STEPS)
    assert len(made) <= 3


@settings(max_examples=25, deadline=None)
@given(seeds, noises, st.sampled_from(["step", "there and back", "ramp", "burst", "drift of all"]), st.booleans())
def test_nothing_goes_back_and_forth(seed, noise, kind, is_measured):
    """A cut that was left comes again only after a rank has changed its speed, or where its steps were faster."""
    speeds: dict[str, Slowness] = {
        "step": slow_from(60, 1, 3.0),
        "there and back": lambda step, rank: 3.0 if rank == 1 and 60 < step <= 240 else 1.0,
        "ramp": lambda step, rank: 1.0 + (min(step, 400) / 200 if rank == 2 else 0.0),
        "burst": lambda step, rank: 8.0 if rank == 0 and 100 < step <= 103 else 1.0,
        "drift of all": lambda step, rank: 1.0 + step / 100,
    }
    one = world(seed, speeds[kind], error=0.05 if is_measured else 0.4, noise=noise)
    policy = policy_of(one, is_measured)
    cuts = [cut(policy.plan)]
    made = train(policy, one, seed)
    for move in made:
        assert move.gain > LEAST_GAIN
        cuts.append(cut(move.plan))
    changes_of_speed = {"step": 1, "there and back": 2, "ramp": 2, "burst": 0, "drift of all": 0}
    again = len(cuts) - len(set(cuts))
    assert again <= max(changes_of_speed[kind] - 1, 0) + (not is_measured)
    assert len(made) <= 2 * changes_of_speed[kind] + 4
    if kind in ("burst", "drift of all") and is_measured:
        assert len(made) <= 1


def test_costs_that_were_assumed_wrongly_are_learned_and_do_not_look_like_a_slow_rank():
    one = World([1.0] * 8, [1, 1, 1, 4, 1, 1, 1, 1], even)
    layers = tuple(Layer(f"layer {i}", 1 / 3, 1 / 3, 1 / 3, 0, 0, 8) for i in range(8))
    plan = by_hand(8, num_ranks=2, schedule="1f1b", num_microbatches=8)
    policy = Rebalance(plan, Profile("model", 1, layers), Topology.local(2, 1e12, 0.0), False)
    made = train(policy, one, 0)
    assert len(made) <= 3
    assert max(sum(one.true[i] for i in stage) for stage in cut(policy.plan)) == 7


def test_a_surprise_between_moves_is_the_ranks_and_one_with_a_move_is_the_layers():
    costs = RunningCosts([1.0] * 4, 2, 0.5)
    stages = [(0, 1), (2, 3)]
    for times in (2.0, 2.0, 6.0):
        before = costs.observe({(0, 0): 2.0, (1, 1): times}, stages, 0.01, False)
    assert before.slowness[1] / before.slowness[0] == pytest.approx(3.0, rel=0.02)
    assert before.costs == pytest.approx([1.0] * 4, rel=0.02)
    # Layer 2 turns out to be three times as expensive as assumed.
    after = costs.observe({(0, 0): 3.5, (1, 1): 3.0 * 0.5}, [(0, 1, 2), (3,)], 0.01, True)
    assert after.slowness[1] / after.slowness[0] == pytest.approx(3.0, rel=0.1)
    assert after.costs[2] / after.costs[3] == pytest.approx(3.0, rel=0.1)
    assert after.costs[2] / after.costs[0] == pytest.approx(1.5, rel=0.1)


def test_a_move_must_pay_for_itself_over_the_steps_that_are_left():
    one = world(1, slow_from(50, 1, 3.0), noise=0.0, bad=0.0)
    assert train(policy_of(one), one, 1, build_s=1e6) == []
    assert len(train(policy_of(one), one, 1, build_s=1.0)) == 1
    assert train(policy_of(one), one, 1, steps=56, build_s=1.0) == []


def test_where_copies_differ_in_speed_their_shares_change_and_no_layer_moves():
    one = World([1.0] * 9, [1.0] * 9, lambda step, rank: 3.0 if rank % 2 and step > 50 else 1.0, copies=2)
    policy = policy_of(one)
    slow_copy = {ranks[1] % 2 for ranks in policy.plan.placement.ranks}
    if slow_copy != {1}:
        one = one._replace(slowness=lambda step, rank: 3.0 if rank >= RANKS and step > 50 else 1.0)
    before = cut(policy.plan)
    made = train(policy, one, 0)
    assert [move.plan.shares for move in made] == [(6, 2)]
    assert cut(policy.plan) == before
    assert made[0].what == "the copies take 6-2 micro-batches in place of 4-4"


def test_a_move_says_what_and_why():
    one = world(1, slow_from(50, 1, 3.0), noise=0.0, bad=0.0)
    policy = policy_of(one)
    before = policy.plan
    (move,) = train(policy, one, 1)
    assert changes(before, move.plan) == move.what
    assert "layer 3 moves from stage 1 to stage 0" in move.what
    assert move.why.startswith("rank 1 takes 3.0 × as long as before; rank 1 works ")
    assert str(move).startswith(f"after step {move.step}: {move.what}; {move.why}; predicted: ")


def test_a_disappointing_move_is_followed_by_a_longer_pause():
    """A machine whose steps stay as long as they were, whatever moves."""
    one = world(3, slow_from(50, 1, 3.0), noise=0.0, bad=0.0)
    policy = policy_of(one)
    made = []
    draw = random.Random(3)
    for step in range(WINDOW, STEPS, WINDOW):
        # Alternately rank 0 and rank 2 seem to be slow, for long enough to be believed.
        turn = (step // 48) % 3
        times = seconds(
            one._replace(slowness=lambda _, rank, turn=turn: 3.0 if rank == turn else 1.0), policy.plan, step, draw
        )
        move = policy.look(Window(step, times, 0.0, 100.0, 1000, 1.0))
        if move is not None:
            policy.moved(move)
            made.append(move.step)
    gaps = [after - before for before, after in pairwise(made)]
    assert max(gaps) > 2 * gaps[0] > 0
