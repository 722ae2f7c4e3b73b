"""The policy by which layers move: random times of a run's stages in, moves out."""

import random
import re
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import pytest

from pipefit.planner import by_hand
from pipefit.planner.better_plan import estimate, learned
from pipefit.planner.rebalance import LEAST_GAIN, Move, Rebalance, Window, shape_of
from pipefit.spec import Device, Layer, Level, Plan, Profile, Topology
from pipefit.timeline.stage_seconds import middle

WINDOW, STEPS, RANKS = 8, 320, 3
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


def policy_of(one: World) -> Rebalance:
    layers = (Layer(f"layer {i}", cost / 3, cost / 3, cost / 3, 0, 0, 8) for i, cost in enumerate(one.assumed))
    profile = Profile("model", 1, tuple(layers))
    ranks = RANKS * one.copies
    plan = by_hand(
        len(one.assumed), num_ranks=ranks, schedule="1f1b", num_microbatches=8, replicas=(one.copies,), profile=profile
    )
    return Rebalance(plan, profile, Topology.local(ranks, 1e12, 0.0))


def seconds(one: World, plan: Plan, step: int, draw: random.Random) -> dict[tuple[int, int], float]:
    """The times that the ranks measure in a step."""
    found = {}
    for stage, (spec, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        for rank in ranks:
            whole = sum(one.true[layer] for layer in spec.layers) * one.slowness(step, rank)
            whole *= draw.lognormvariate(0, one.noise)
            if draw.random() < one.bad:
                whole *= OUTLIER
            found[rank, stage] = whole
    return found


def train(policy: Rebalance, one: World, seed: int, steps: int = STEPS, move_s: float = 1.0) -> list[Move]:
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
        move = policy.look(Window(step, times, noise, period_s, steps - step, move_s))
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


NOISES = [0.0, 0.02, 0.05, 0.1]
"""Of single times; a window of 8 steps measures with half of it."""

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_moves_while_nothing_changes_whatever_single_steps_do(seed):
    one = world(seed, even, error=0.0, noise=NOISES[seed % 4], bad=0.05)
    assert train(policy_of(one), one, seed) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lasting_change_is_answered_soon_and_the_new_cut_is_nearly_the_best(seed):
    draw = random.Random(seed)
    when = draw.randint(30, 200)
    one = world(seed, slow_from(when, seed % RANKS, draw.uniform(2.0, 6.0)), error=0.0, noise=NOISES[seed % 4])
    policy = policy_of(one)
    before = cut(policy.plan)
    made = train(policy, one, seed)
    lost = 1 - best(one, STEPS) / slowest(one, before, STEPS)
    if lost > 0.3:
        assert when < made[0].step <= when + 4 * WINDOW
    assert slowest(one, cut(policy.plan), STEPS) <= 1.3 * best(one, STEPS)
    assert len(made) <= 2


SPEEDS: dict[str, tuple[Slowness, int]] = {
    "step": (slow_from(60, 1, 3.0), 1),
    "there and back": (lambda step, rank: 3.0 if rank == 1 and 60 < step <= 200 else 1.0, 2),
    "ramp": (lambda step, rank: 1.0 + (min(step, 250) / 125 if rank == 2 else 0.0), 2),
    "burst": (lambda step, rank: 8.0 if rank == 0 and 100 < step <= 103 else 1.0, 0),
    "drift of all": (lambda step, rank: 1.0 + step / 100, 0),
}
"""Speeds of ranks, and how often they change."""


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("kind", SPEEDS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_goes_back_and_forth(seed, kind, is_measured):
    """A cut that was left comes again only after a rank has changed its speed, or where its steps were faster."""
    slowness, num_changes = SPEEDS[kind]
    one = world(seed, slowness, error=0.05 if is_measured else 0.4, noise=NOISES[1 + seed])
    policy = policy_of(one)
    cuts = [cut(policy.plan)]
    made = train(policy, one, seed)
    for move in made:
        assert move.gain > LEAST_GAIN
        cuts.append(cut(move.plan))
    again = len(cuts) - len(set(cuts))
    assert again <= max(num_changes - 1, 0) + (not is_measured)
    assert len(made) <= num_changes + (1 if is_measured else 3)


def test_costs_that_were_assumed_wrongly_are_learned_and_do_not_look_like_a_slow_rank():
    one = World([1.0] * 8, [1, 1, 1, 4, 1, 1, 1, 1], even)
    layers = tuple(Layer(f"layer {i}", 1 / 3, 1 / 3, 1 / 3, 0, 0, 8) for i in range(8))
    plan = by_hand(8, num_ranks=2, schedule="1f1b", num_microbatches=8)
    policy = Rebalance(plan, Profile("model", 1, layers), Topology.local(2, 1e12, 0.0))
    made = train(policy, one, 0)
    assert len(made) <= 3
    assert max(sum(one.true[i] for i in stage) for stage in cut(policy.plan)) == 7


def test_a_surprise_between_moves_is_the_ranks_and_one_with_a_move_is_the_layers():
    layers = tuple(Layer(f"layer {i}", 1 / 3, 1 / 3, 1 / 3, 0, 0, 8) for i in range(4))
    plan = by_hand(4, num_ranks=2, schedule="1f1b", num_microbatches=8)
    before = estimate(plan, Profile("model", 1, layers), {(0, 0): 2.0, (1, 1): 6.0})
    assert before.slowness == pytest.approx((1.0, 3.0))
    after = by_hand(4, num_ranks=2, schedule="1f1b", num_microbatches=8, stages=[3, 1])
    profile = learned(after, before, {(0, 0): 4.5, (1, 1): 3.0})
    assert [layer.total_s for layer in profile.layers] == pytest.approx([1.5, 1.5, 1.5, 1.0])
    assert estimate(after, profile, {(0, 0): 4.5, (1, 1): 3.0}).slowness == pytest.approx(before.slowness)


def test_a_move_must_pay_for_itself_over_the_steps_that_are_left():
    one = world(1, slow_from(50, 1, 3.0), noise=0.0, bad=0.0)
    assert train(policy_of(one), one, 1, move_s=1e6) == []
    assert len(train(policy_of(one), one, 1, move_s=1.0)) == 1
    assert train(policy_of(one), one, 1, steps=56, move_s=1.0) == []


def test_where_copies_differ_in_speed_their_shares_change_and_no_layer_moves():
    one = World([1.0] * 9, [1.0] * 9, even, copies=2)
    policy = policy_of(one)
    slow = {ranks[1] for ranks in policy.plan.placement.ranks}
    one = one._replace(slowness=lambda step, rank: 3.0 if rank in slow and step > 50 else 1.0)
    before = cut(policy.plan)
    (move,) = train(policy, one, 0)
    assert move.plan.shares == (6, 2)
    assert cut(policy.plan) == before
    assert move.what == "stages of 3-3-3 layers → stages of 3-3-3 layers, copies with 6-2 micro-batches"


def test_a_move_says_what_and_why():
    one = world(1, slow_from(50, 1, 3.0), noise=0.0, bad=0.0)
    policy = policy_of(one)
    before = policy.plan
    (move,) = train(policy, one, 1)
    assert move.what == f"{shape_of(before)} → {shape_of(move.plan)}"
    each = r"rank 1 takes \S+ s per micro-batch, rank \d \S+ s"
    says = each + r"; rank 1 takes 3\.\d × as long for a layer as the fastest rank"
    assert re.fullmatch(says, move.why)
    assert str(move).startswith(f"after step {move.step}: {move.what}; {move.why}; predicted: ")


def test_where_a_move_brings_nothing_the_next_one_must_promise_more():
    """A machine whose steps stay as long as they were, whatever moves."""
    one = world(3, even, noise=0.0, bad=0.0)
    policy = policy_of(one)
    gains = []
    draw = random.Random(3)
    for step in range(WINDOW, 2000, WINDOW):
        # One rank after the other seems to be slow, for long enough to be believed.
        turn = (step // 48) % 3
        slow = one._replace(slowness=lambda _, rank, turn=turn: 1.5 if rank == turn else 1.0)
        move = policy.look(Window(step, seconds(slow, policy.plan, step, draw), 0.0, 100.0, 1000, 1.0))
        if move is not None:
            policy.moved(move)
            gains.append(move.gain)
    assert 1 <= len(gains) <= 4
    assert all(gain > LEAST_GAIN * 2**number for number, gain in enumerate(gains))


@pytest.mark.parametrize(("room", "num_moves"), [(float("inf"), 1), (4 * 32, 1), (4 * 32 - 1, 0)])
def test_no_layer_moves_to_a_device_that_lacks_memory_for_it(room, num_moves):
    """A layer takes 32 bytes: its weights, their gradients, and twice as much for Adam."""
    one = World([1.0] * 9, [1.0] * 9, slow_from(50, 1, 6.0))
    layers = tuple(Layer(f"layer {i}", 1 / 3, 1 / 3, 1 / 3, 0, 0, 8) for i in range(9))
    plan = by_hand(9, num_ranks=RANKS, schedule="1f1b", num_microbatches=8)
    topology = Topology((Level("machine", RANKS, 1e12),), Device(memory_bytes=room))
    made = train(Rebalance(plan, Profile("model", 1, layers), topology), one, 0)
    assert [[len(stage) for stage in cut(move.plan)] for move in made] == [[4, 1, 4]] * num_moves
