"""Trends of computed plans on a cluster of A100: directions only, no published number goes in or must come out."""

import msgspec
import pytest

from pipefit.errors import ProfileError
from pipefit.planner import gpt_profile, plan
from pipefit.planner.computed_profile import profile_at
from pipefit.planner.machines import load_topology

pytestmark = pytest.mark.slow

BASE = load_topology("dgx-a100-64")
# Time alone decides.
ROOMY = msgspec.structs.replace(BASE, device=msgspec.structs.replace(BASE.device, memory_bytes=1e15))
SMALL = gpt_profile(32, 3840, 32, device=BASE.device)
LARGE = gpt_profile(32, 20480, 128, device=BASE.device)


def rate(profile, batch, t, p, b=1, schedule="1f1b", **more):
    found = plan(
        profile, ROOMY, global_batch=batch, tensors=[t], depths=[p], microbatch_sizes=[b],
        schedules=[schedule], recompute="layer", shard="none", **more,
    )  # fmt: skip
    return found.prediction.throughput


@pytest.mark.parametrize("batch", [128, 512])
def test_a_small_model_is_slower_the_more_devices_share_each_layer_or_make_a_pipeline(batch):
    shared = [rate(SMALL, batch, t, 1) for t in (1, 2, 4, 8, 16)]
    piped = [rate(SMALL, batch, 1, p) for p in (1, 2, 4, 8)]
    assert shared == sorted(shared, reverse=True)
    assert piped == sorted(piped, reverse=True)


@pytest.mark.parametrize("batch", [32, 128])
def test_a_large_model_is_fastest_with_tensor_parallelism_inside_servers_and_a_pipeline_across(batch):
    found = {(t, 64 // t): rate(LARGE, batch, t, 64 // t, blocking=True) for t in (2, 4, 8, 16, 32)}
    assert max(found, key=found.__getitem__) == (8, 8)


def test_neither_the_smallest_nor_the_largest_microbatch_is_best_where_there_are_many():
    rates = {b: rate(SMALL, 512, 8, 8, b) for b in (1, 2, 4, 8, 16, 32, 64)}
    assert max(rates, key=rates.__getitem__) not in (1, 64)


def test_interleaving_gains_less_the_larger_the_batch():
    gains = [rate(LARGE, m, 8, 8, schedule="interleaved", chunks=[2]) / rate(LARGE, m, 8, 8) for m in (8, 16, 64)]
    assert gains[0] > gains[1] > gains[2]


def test_whole_messages_cost_more_where_ranks_wait_for_them():
    settings = {"schedule": "interleaved", "chunks": [4], "blocking": True}
    pieces, whole = (rate(LARGE, 64, 8, 8, whole_messages=whole, **settings) for whole in (False, True))
    assert whole < pieces < rate(LARGE, 64, 8, 8, schedule="interleaved", chunks=[4])


def test_a_shard_is_computed_from_its_own_shapes():
    whole, shard = profile_at(SMALL, 1, 1, ROOMY), profile_at(SMALL, 1, 8, ROOMY)
    block, part = whole.layers[1], shard.layers[1]
    assert part.weight_bytes == block.weight_bytes / 8
    # Norms, residuals and all-reduces are not sharded, and small products are less efficient.
    assert part.forward_s > block.forward_s / 8 * 1.2
    assert part.output_bytes == block.output_bytes


def test_twice_the_samples_take_less_than_twice_the_time():
    one, two = (profile_at(SMALL, b, 8, ROOMY).layers[1] for b in (1, 2))
    assert one.total_s < two.total_s < 2 * one.total_s


def test_a_saved_profile_can_be_computed_again(tmp_path):
    again = type(SMALL).load(SMALL.save(tmp_path / "gpt.json"))
    assert again == SMALL
    assert profile_at(again, 4, 2, ROOMY) == profile_at(SMALL, 4, 2, ROOMY)


def test_elements_of_four_bytes_double_what_a_gpt_keeps_and_are_part_of_its_name():
    half, full = (gpt_profile(2, 512, 8, device=BASE.device, bytes=size) for size in (2, 4))
    assert full.model == "gpt:layers=2,hidden=512,heads=8,bytes=4"
    assert [layer.weight_bytes for layer in full.layers] == [2 * layer.weight_bytes for layer in half.layers]
    again = profile_at(full, 1, 2, BASE)
    assert again.layers[1].output_bytes == full.layers[1].output_bytes
    assert again.model == full.model


@pytest.mark.parametrize("size", [0, 1, 8])
def test_elements_of_other_bytes_are_refused(size):
    with pytest.raises(ProfileError, match=f"bytes: expected 2 or 4, got {size}"):
        gpt_profile(2, 512, 8, device=BASE.device, bytes=size)


def test_reductions_of_stages_that_leave_a_server_share_its_port():
    inner, outer = load_topology("nvlink-2x8").levels
    found = []
    for one_port in (False, True):
        levels = inner, msgspec.structs.replace(outer, one_port=one_port)
        machine = msgspec.structs.replace(load_topology("nvlink-2x8"), levels=levels)
        machine = msgspec.structs.replace(machine, device=ROOMY.device)
        profile = gpt_profile(32, 1920, 32, sequence=512, device=machine.device)
        wishes = {"depths": [8], "tensors": [1], "microbatch_sizes": [1], "schedules": ["1f1b"], "shard": "none"}
        found.append(plan(profile, machine, global_batch=256, **wishes).prediction.period_s)
    # Eight rings of one link each, or all of them through one.
    weights = sum(layer.wgrad_bytes for layer in profile.layers)
    assert found[1] - found[0] == pytest.approx(weights * 7 / 8 / outer.bandwidth_bytes_per_s, rel=0.3)
