import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.partition.cases import chain, profiles

from pipefit.errors import PlanError
from pipefit.partition import gpipe, minmax, partition, uniform
from pipefit.partition.balance import divide, spans

counts = st.integers(1, 5)


def all_counts(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *cuts, num_layers]
        yield [high - low for low, high in pairwise(edges)]


def stage_costs(profile, layer_counts, bandwidth=None, latency=0.0):
    times = [layer.total_s for layer in profile.layers]
    times[-1] += profile.loss_s
    start, result = 0, []
    for count in layer_counts:
        end = start + count
        cost = sum(times[start:end])
        if bandwidth:
            cuts = [profile.cut_bytes[cut - 1] for cut in (start, end) if 0 < cut < len(profile)]
            cost += sum(2 * (size / bandwidth + latency) for size in cuts)
        result.append(cost)
        start = end
    return result


def sizes(partition):
    return [len(stage.layers) for stage in partition.stages]


def variance(costs):
    mean = sum(costs) / len(costs)
    return sum((cost - mean) ** 2 for cost in costs)


@given(profiles(7), counts)
def test_gpipe_has_the_least_variance_and_of_equals_the_earliest_cuts(profile, num_stages):
    if num_stages > len(profile):
        return
    ranked = [(variance(stage_costs(profile, one)), one) for one in all_counts(len(profile), num_stages)]
    least = min(cost for cost, _ in ranked)
    assert sizes(gpipe(profile, num_stages)) == min(one for cost, one in ranked if cost <= least + 1e-6)


@given(profiles(7), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4))
def test_gpipe_on_unequal_devices_has_the_least_squares_from_the_time_that_all_would_take(profile, speeds):
    if len(speeds) > len(profile):
        return

    def away(layer_counts):
        costs = stage_costs(profile, layer_counts)
        return sum((cost / speed - sum(costs) / sum(speeds)) ** 2 for cost, speed in zip(costs, speeds, strict=True))

    least = min(map(away, all_counts(len(profile), len(speeds))))
    assert away(sizes(gpipe(profile, len(speeds), speeds=speeds))) <= least * (1 + 1e-9) + 1e-6


@given(profiles(7), counts, st.sampled_from([None, 1.0, 10.0]), st.sampled_from([0.0, 2.0]))
def test_minmax_has_the_least_maximum(profile, num_stages, bandwidth, latency):
    if num_stages > len(profile):
        return
    found = minmax(profile, num_stages, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    worst = [max(stage_costs(profile, one, bandwidth, latency)) for one in all_counts(len(profile), num_stages)]
    assert max(stage_costs(profile, sizes(found), bandwidth, latency)) == pytest.approx(min(worst))


def test_minmax_reaches_the_optimum_where_a_greedy_cut_misses_it():
    profile = chain([4, 3, 3, 2, 6])  # greedy filling up to the mean of 6 gives 7 | 5 | 6 or worse
    assert sizes(minmax(profile, 3)) == [2, 2, 1]


def test_uniform_gives_the_first_stages_one_more():
    assert sizes(uniform(chain([1] * 7), 3)) == [3, 2, 2]


def test_by_hand_refuses_to_lose_a_layer():
    assert sizes(partition(chain([1] * 7), method="by_hand", counts=[1, 6])) == [1, 6]
    with pytest.raises(PlanError, match="7 layers"):
        partition(chain([1] * 7), method="by_hand", counts=[1, 5])


@pytest.mark.parametrize("method", [gpipe, minmax, uniform])
def test_more_stages_than_layers_are_refused(method):
    with pytest.raises(PlanError, match="3 stages need at least 3 layers"):
        method(chain([1, 1]), 3)
    with pytest.raises(PlanError, match="at least 1"):
        method(chain([1, 1]), 0)


def test_costs_of_another_length_and_no_bandwidth_are_refused():
    with pytest.raises(PlanError, match="got 1"):
        minmax(chain([1, 1]), 2, costs=[1.0])
    with pytest.raises(PlanError, match="bandwidth"):
        minmax(chain([1, 1]), 2, bandwidth_bytes_per_s=0.0)


@pytest.mark.parametrize("seed", range(6))
def test_division_equals_trying_every_cut(seed):
    rng = random.Random(seed)
    times = [rng.uniform(1, 5) for _ in range(7)]
    whole = spans(times)
    # Stage 1 is twice as slow, and stage 0 may hold at most two layers.
    ends = np.arange(8)
    costs = [np.where(ends[None, :] - ends[:, None] <= 2, whole, np.inf), 2 * whole, whole]
    best = min(max(costs[0][0, a], costs[1][a, b], costs[2][b, 7]) for a, b in combinations(range(1, 7), 2))
    counts = divide(costs)
    a, b = counts[0], counts[0] + counts[1]
    assert sum(counts) == 7 and max(costs[0][0, a], costs[1][a, b], costs[2][b, 7]) == pytest.approx(best)
    assert divide([np.full((8, 8), np.inf)] * 2) is None
