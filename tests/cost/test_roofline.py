"""The law of computed costs: what shape, bytes and kernels must do to the seconds of an operation."""

import csv
import itertools
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cost.kernels import attention_s
from pipefit.cost.rings import all_gather_s, all_reduce_s, even, ring_of
from pipefit.cost.roofline import flops_s, pass_s, product_s, slowest_of
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.machines import load_topology, topology_names
from pipefit.planner.transformer import transformer_of
from pipefit.spec import Device, Level, Topology

A100 = load_topology("dgx-a100-8").device
BARE = Device(flops=1e12, efficiency=0.5)
sizes = st.integers(1, 5000)


@given(sizes, sizes, sizes, st.integers(1, 4))
def test_no_product_is_faster_than_its_flop_or_its_bytes(m, n, k, count):
    seconds = product_s(A100, m, n, k, count)
    assert seconds >= 2 * count * m * n * k / (A100.flops * A100.efficiency)
    assert seconds >= 2 * count * (m * k + k * n + m * n) / A100.memory_bandwidth_bytes_per_s / 2
    assert seconds >= A100.kernel_s


@given(sizes, sizes, sizes)
def test_a_larger_product_never_takes_less_time(m, n, k):
    seconds = product_s(A100, m, n, k)
    assert product_s(A100, m + 1, n, k) >= seconds
    assert product_s(A100, m, n + 1, k) >= seconds
    assert product_s(A100, m, n, k + 1) >= seconds


def test_a_row_more_than_full_waves_costs_tiles_of_their_own():
    device = Device(flops=1e12, efficiency=1.0, cores=10, tile=(32, 32))
    full = product_s(device, 320, 32, 3200)
    assert full == pytest.approx(2 * 320 * 32 * 3200 / 1e12)
    assert product_s(device, 321, 32, 3200) == pytest.approx(2 * full), "a second wave of one tile"
    assert product_s(device, 319, 32, 3200) == full, "a tile is computed whole"


def test_without_cores_a_product_is_as_efficient_in_every_shape():
    for m, n, k in itertools.product((1, 7, 4096), repeat=3):
        assert product_s(BARE, m, n, k) == pytest.approx(2 * m * n * k / 0.5e12)


def test_what_only_moves_bytes_takes_their_time_and_a_kernel():
    device = msgspec.structs.replace(BARE, memory_bandwidth_bytes_per_s=1e9, kernel_s=2.0)
    assert pass_s(device, 3e9) == 5.0
    assert flops_s(device, 0.5e12, 3e9) == 5.0
    assert flops_s(device, 2e12, 3e9) == 6.0


def test_dropout_waits_for_its_bytes_or_its_random_numbers():
    device = msgspec.structs.replace(BARE, memory_bandwidth_bytes_per_s=1e9, random_rate=1e9)
    assert pass_s(device, 3e9, randoms=5e9) == 5.0
    assert pass_s(device, 5e9, randoms=3e9) == 5.0
    assert pass_s(BARE, 3e9, randoms=5e9) == 0.0, "a device without these figures has them for nothing"


def test_the_slowest_of_more_devices_is_slower():
    device = msgspec.structs.replace(BARE, spread=0.01)
    found = [slowest_of(device, count).efficiency for count in (1, 2, 8, 1024)]
    assert found == sorted(found, reverse=True)
    assert found[0] == device.efficiency
    assert found[1] == pytest.approx(device.efficiency * (1 - 0.00564), rel=1e-3), "of two, σ/√π below the mean"
    assert slowest_of(BARE, 1024) == BARE


def test_small_dimensions_are_inefficient():
    def rate(m, n, k):
        return 2 * m * n * k / product_s(A100, m, n, k)

    rates = [rate(4096, 4096, k) for k in (32, 128, 512, 4096)]
    assert rates == sorted(rates)
    assert rate(2048, 64, 4096) < rate(2048, 4096, 4096)


@given(st.integers(2, 64), st.floats(0, 1e9), st.floats(0, 1e-3))
def test_an_all_reduce_takes_no_longer_than_a_reduce_scatter_and_an_all_gather(d, size, latency):
    ring = even(d, 1e9, latency)
    assert all_reduce_s(ring, size) <= 2 * all_gather_s(ring, size) * (1 + 1e-9)


def test_large_tensors_go_around_the_ring_and_small_ones_up_the_tree():
    ring = even(64, 1e9, 1e-6)
    assert all_reduce_s(ring, 1e9) == pytest.approx(2 * (63e-6 + 63 / 64))
    assert all_reduce_s(ring, 8) == pytest.approx(2 * (6e-6 + 8e-9))


def test_a_ring_over_servers_pays_each_level_for_its_own_messages():
    two = Topology((Level("server", 8, 200e9, 1.0), Level("cluster", 4, 20e9, 100.0)))
    assert ring_of(two, range(8)) == even(8, 200e9, 1.0)
    assert ring_of(two, range(0, 32, 8)) == even(4, 20e9, 100.0)
    whole = ring_of(two, range(32))
    assert (whole.bandwidth_bytes_per_s, whole.ring_s, whole.tree_s) == (160e9, 28 * 1.0 + 3 * 100.0, 3.0 + 200.0)


@pytest.mark.parametrize("name", topology_names())
def test_every_packaged_device_is_described_for_the_law(name):
    device = load_topology(name).device
    assert device.cores and device.memory_bandwidth_bytes_per_s and device.kernel_s
    assert Topology.parse(_saved(name)) == load_topology(name)


def _saved(name):
    from pipefit.spec.topology import _as_toml

    return _as_toml(load_topology(name))


PRODUCTS = Path(__file__).with_name("products-h100.csv")
"""Microseconds of torch's `linear` in bf16 on one H100 (700 W), medians of 15, random normal numbers."""


def test_products_measured_on_an_h100_are_as_fast_as_its_packaged_figures_say():
    device = load_topology("8xH100").device
    errors = []
    for line in csv.DictReader(PRODUCTS.read_text().splitlines()):
        m, n, k = (int(line[name]) for name in "mnk")
        if m * n * k > 15e9:
            errors.append(product_s(device, m, n, k) / (1e-6 * float(line["microseconds"])) - 1)
    assert len(errors) == 124
    assert abs(median(errors)) < 0.03
    assert median(map(abs, errors)) < 0.07


@pytest.mark.parametrize(
    ("m", "n", "k", "measured_s"),
    [
        (8192, 8192, 8192, 727.6e-6),
        (4096, 4096, 4096, 95.1e-6),
        (8192, 2560, 8192, 224.8e-6),
        (2048, 14336, 4096, 161.7e-6),
        (16384, 16384, 16384, 5723.9e-6),
    ],
)
def test_products_in_8_bits_measured_on_an_h100_are_within_a_tenth(m, n, k, measured_s):
    device = load_topology("8xH100").device
    fast = msgspec.structs.replace(device, flops=device.fp8_flops)
    assert product_s(fast, m, n, k, 1, 1) == pytest.approx(measured_s, rel=0.1)


ATTENTION = [
    # Heads of 128 and tokens; microseconds on one H100 (700 W, torch 2.11) of FlashAttention 2 and cuDNN, each
    # forward and backward, by `python -m benchmarks gpu-law`.
    (40, 2048, (194.4, 575.6), (100.8, 362.4)),
    (96, 2048, (384.9, 1256.6), (205.7, 681.3)),
    (32, 8192, (1700.5, 4847.5), (890.3, 2591.6)),
]


@pytest.mark.parametrize(("heads", "tokens", "flash_us", "cudnn_us"), ATTENTION)
def test_attention_of_few_heads_waits_for_the_last_rows_as_measured_on_an_h100(heads, tokens, flash_us, cudnn_us):
    device = load_topology("8xH100").device
    ways = (1, 5 / 2)  # the backward has five products in place of two
    flops = 2 * heads * tokens * tokens * 128
    last = 4 * 128 * tokens * 128
    moved = 4 * 2 * heads * tokens * 128
    for shares, measured_us in ((device.flash, flash_us), (device.cudnn, cudnn_us)):
        for share, products, each_us in zip(shares, ways, measured_us, strict=True):
            found_s = attention_s(device, share, products * flops, products * last, products * moved)
            assert found_s == pytest.approx(1e-6 * each_us, rel=0.25)


BLOCKS = Path(__file__).with_name("blocks-h100.csv")
"""Blocks of transformers' Llama and of the built-in GPT in bf16 on one H100 (700 W), eager or compiled, repeated for a
second; medians by `python -m benchmarks gpu-law`."""


def test_blocks_measured_on_an_h100_take_the_seconds_of_the_law():
    device = load_topology("8xH100").device
    for line in csv.DictReader(BLOCKS.read_text().splitlines()):
        compiled = line["compiled"]
        ways = ",attention=cudnn"  # which torch chose
        if line["model"].startswith("llama"):
            ways += f",fused_norms={compiled},fused_passes={compiled}"
        block = transformer_profile(transformer_of(line["model"] + ways), 1, device).layers[1]
        assert block.forward_s == pytest.approx(1e-3 * float(line["forward_ms"]), rel=0.045), line
        assert block.backward_s == pytest.approx(1e-3 * float(line["backward_ms"]), rel=0.045), line
