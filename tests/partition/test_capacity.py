import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.partition.cases import chain, profiles
from tests.partition.test_balance import all_counts, sizes

from pipefit.errors import InfeasibleError, PlanError
from pipefit.partition import hydra, smallest_capacity
from pipefit.partition.capacity import shard_bytes

pytestmark = pytest.mark.slow


def shards(partition):
    return [(stage.layers[0], stage.layers[-1] + 1) for stage in partition.stages]


def bounds(counts):
    return [(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]


def every_partition(profile):
    for num_stages in range(1, len(profile) + 1):
        yield from all_counts(len(profile), num_stages)


def test_it_cuts_when_the_next_layer_would_not_fit():
    profile = chain([1] * 5, weights=[10, 10, 10, 10, 10])
    assert sizes(hydra(profile, 80, optimizer_factor=2.0)) == [2, 2, 1]
    assert sizes(hydra(profile, 80, optimizer_factor=0.0)) == [4, 1]


def test_a_shard_holds_weights_gradients_states_saved_bytes_and_both_boundaries():
    profile = chain([1] * 3, outputs=[5, 6, 7], weights=[10, 20, 30], saved=[1, 2, 3])
    assert shard_bytes(profile, 1, 2, optimizer_factor=2.0) == 20 * 4 + 2 + 5 + 6
    assert shard_bytes(profile, 0, 3, optimizer_factor=0.0) == 60 * 2 + 6 + 0 + 7


@given(profiles(6), st.integers(1, 600), st.sampled_from([0.0, 2.0]))
def test_every_shard_fits_and_nothing_that_could_be_cut_is_refused(profile, capacity, factor):
    possible = [
        one
        for one in every_partition(profile)
        if all(shard_bytes(profile, a, b, factor) <= capacity for a, b in bounds(one))
    ]
    if not possible:
        with pytest.raises(InfeasibleError):
            hydra(profile, capacity, factor)
        return
    found = hydra(profile, capacity, factor)
    assert sizes(found) in possible
    assert sizes(found)[0] == max(one[0] for one in possible)


@given(profiles(6), st.sampled_from([0.0, 2.0]))
def test_smallest_capacity_is_the_least_maximum_of_all_cuts(profile, factor):
    worst = [max(shard_bytes(profile, a, b, factor) for a, b in bounds(one)) for one in every_partition(profile)]
    assert smallest_capacity(profile, factor) == pytest.approx(min(worst))


@given(profiles(6), st.integers(1, 900))
def test_with_a_double_buffer_each_shard_fits_beside_any_other_being_loaded(profile, capacity):
    def loaded(a, b):
        return sum(layer.weight_bytes for layer in profile.layers[a:b]) * 3 + (profile.cut_bytes[a - 1] if a else 0)

    if smallest_capacity(profile, 2.0, double_buffer=True) > capacity:
        return
    found = shards(hydra(profile, max(capacity, 1), 2.0, double_buffer=True))
    if len(found) > 1:
        assert all(shard_bytes(profile, *x, 2.0) + loaded(*y) <= capacity + 1e-6 for x in found for y in found)


def test_the_capacity_it_names_works():
    profile = chain([1] * 3, outputs=[5, 6, 7], weights=[10, 20, 30], saved=[1, 2, 3])
    with pytest.raises(InfeasibleError, match=r"layer 2 \(layer2\) needs 136 B in isolation") as caught:
        hydra(profile, 100)
    named = float(re.search(r"works is ([\d.]+) B", str(caught.value)).group(1))
    assert hydra(profile, named).num_layers == 3
    with pytest.raises(InfeasibleError):
        hydra(profile, named - 1)
    double = smallest_capacity(profile, double_buffer=True)
    assert double > named and hydra(profile, double, double_buffer=True).num_layers == 3


def test_no_capacity_is_refused():
    with pytest.raises(PlanError, match="capacity_bytes"):
        hydra(chain([1]), 0)
