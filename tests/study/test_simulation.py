"""A study on paper: what policies take, and the time none of them can beat."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import PipefitError
from pipefit.study.simulation import POLICIES, TrialCost, coarser, lower_bound_s, simulate_study

pytestmark = pytest.mark.slow

SECONDS = st.integers(1, 40).map(lambda n: n / 8)
COSTS = st.builds(TrialCost, st.lists(SECONDS, min_size=1, max_size=4).map(tuple), st.integers(1, 6), st.just(0.0))
STUDIES = st.lists(COSTS, min_size=1, max_size=6)


@pytest.mark.parametrize("policy", POLICIES)
@given(costs=STUDIES, num_devices=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_turn_runs_once_in_its_trials_order_and_no_device_does_two_at_a_time(policy, costs, num_devices):
    outcome = simulate_study(costs, num_devices, policy)
    for number, cost in enumerate(costs):
        own = [turn for turn in outcome.turns if turn.trial == number]
        wanted = [(step, turn) for step in range(cost.num_steps) for turn in range(len(cost.turns_s))]
        assert [(turn.step, turn.turn) for turn in own] == wanted
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
        assert all(t.end_s - t.start_s == pytest.approx(cost.turns_s[t.turn]) for t in own)
    for device in range(num_devices):
        own = sorted((t for t in outcome.turns if t.device == device), key=lambda turn: turn.start_s)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    assert outcome.makespan_s >= outcome.bound_s * (1 - 1e-9)


@given(costs=STUDIES, num_devices=st.integers(1, 4), policy=st.sampled_from(["lrtf", "fifo", "round-robin"]))
@settings(max_examples=60, deadline=None)
def test_no_device_idles_while_a_trial_could_take_a_turn(costs, num_devices, policy):
    outcome = simulate_study(costs, num_devices, policy)
    # The classic bound of any greedy rule on chains: the bound's two parts together.
    total = sum(cost.total_s for cost in costs) / num_devices
    assert outcome.makespan_s <= total + max(cost.total_s for cost in costs) + 1e-9


def brute_force(costs, num_devices):
    """The shortest makespan over all orders, for turns of one second."""
    seen = {}

    def least(left):
        if not any(left):
            return 0
        if left not in seen:
            alive = [index for index, n in enumerate(left) if n]
            choices = itertools.combinations(alive, min(num_devices, len(alive)))
            seen[left] = 1 + min(least(tuple(n - (i in chosen) for i, n in enumerate(left))) for chosen in choices)
        return seen[left]

    return least(tuple(cost.num_steps for cost in costs))


@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=5), num_devices=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_with_equal_turns_lrtf_is_the_best_of_all_orders_and_meets_the_bound(steps, num_devices):
    costs = [TrialCost((1.0,), count) for count in steps]
    outcome = simulate_study(costs, num_devices, "lrtf")
    assert outcome.makespan_s <= brute_force(costs, num_devices) + (len(steps) > num_devices)
    assert outcome.makespan_s < outcome.bound_s + 1 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_lrtf_stays_within_a_few_percent_of_the_bound_where_others_do_not(seed):
    import random

    rng = random.Random(seed)
    lengths = [*sorted(rng.randint(10, 60) for _ in range(11)), 200]
    costs = [TrialCost((0.02, 0.05, 0.03), steps) for steps in lengths]
    gaps = {policy: simulate_study(costs, 2, policy).gap for policy in POLICIES}
    assert gaps["lrtf"] < 0.02
    assert gaps["fifo"] > 0.08 and gaps["whole-task"] > 0.08


def test_known_makespans():
    two = [TrialCost((1.0,), 3), TrialCost((1.0,), 3), TrialCost((1.0,), 6)]
    assert simulate_study(two, 2, "whole-task").makespan_s == 9
    assert simulate_study(two, 2, "fifo").makespan_s == 9
    assert simulate_study(two, 2, "lrtf").makespan_s == 6
    assert lower_bound_s([3, 3, 6], 2) == 6
    assert lower_bound_s([3, 3, 9], 2) == 9


def test_whole_tasks_never_move():
    costs = [TrialCost((0.5, 0.25), steps) for steps in (3, 1, 4, 2)]
    outcome = simulate_study(costs, 2, "whole-task")
    for number in range(4):
        assert len({turn.device for turn in outcome.turns if turn.trial == number}) == 1


def test_round_robin_gives_every_trial_a_turn_before_any_gets_a_second():
    outcome = simulate_study([TrialCost((1.0,), 3)] * 4, 1, "round-robin")
    assert [turn.trial for turn in outcome.turns] == [0, 1, 2, 3] * 3


def test_admission_comes_first_and_counts():
    outcome = simulate_study([TrialCost((1.0,), 2, admission_s=0.5)], 1)
    assert [(turn.step, turn.start_s) for turn in outcome.turns] == [(-1, 0), (0, 0.5), (1, 1.5)]
    assert outcome.bound_s == outcome.makespan_s == 2.5


def test_many_turns_are_simulated_in_fewer_and_the_makespan_stays():
    costs = [TrialCost((0.1, 0.2, 0.3), 1000 + 100 * n, admission_s=0.5) for n in range(5)]
    few = coarser(costs, most=3000)
    assert sum(len(cost.turns_s) * cost.num_steps for cost in few) <= 3000 + len(costs)
    assert [cost.total_s for cost in few] == pytest.approx([cost.total_s for cost in costs])
    for policy in POLICIES:
        exact, quick = simulate_study(costs, 2, policy), simulate_study(few, 2, policy)
        assert quick.makespan_s == pytest.approx(exact.makespan_s, rel=0.002)


def test_impossible_studies_are_refused():
    with pytest.raises(PipefitError, match="at least 1 device"):
        simulate_study([], 0)
    with pytest.raises(PipefitError, match="finite"):
        simulate_study([TrialCost((float("nan"),), 1)], 1)
    with pytest.raises(PipefitError, match="did you mean lrtf"):
        simulate_study([TrialCost((1.0,), 1)], 1, "lrft")
    assert simulate_study([], 2).makespan_s == 0
