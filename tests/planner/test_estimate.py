"""PTD-P's arithmetic, beside the figures its authors published."""

import pytest

from pipefit.errors import PlanError
from pipefit.planner import gpt_profile
from pipefit.planner.ptdp import (
    Gpt,
    activation_bytes_per_layer,
    best_microbatch,
    bubble_over_ideal,
    data_bytes,
    flops_per_iteration,
    mfu,
    num_parameters,
    pipeline_bytes,
    state_bytes_per_parameter,
    tensor_bytes_per_layer,
    throughput_samples_per_s,
    training_days,
)
from pipefit.spec import Device

# Parameters in billions, heads, hidden, layers, GPUs, TFLOP/s per GPU, % of 312, PFLOP/s: Narayanan et al., table 1.
TABLE = [
    (1.7, 24, 2304, 24, 32, 137, 44, 4.4),
    (3.6, 32, 3072, 30, 64, 138, 44, 8.8),
    (7.5, 32, 4096, 36, 128, 142, 46, 18.2),
    (18.4, 48, 6144, 40, 256, 135, 43, 34.6),
    (39.1, 64, 8192, 48, 512, 138, 44, 70.8),
    (76.1, 80, 10240, 60, 1024, 140, 45, 143.8),
    (145.6, 96, 12288, 80, 1536, 148, 47, 227.1),
    (310.1, 128, 16384, 96, 1920, 155, 50, 297.4),
    (529.6, 128, 20480, 105, 2520, 163, 52, 410.2),
    (1008.0, 160, 25600, 128, 3072, 163, 52, 502.0),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers", "devices", "tflops", "percent", "total"), TABLE)
def test_the_published_table_comes_out(billions, heads, hidden, layers, devices, tflops, percent, total):
    gpt = Gpt(layers, hidden, heads)
    assert num_parameters(gpt) / 1e9 == pytest.approx(billions, abs=0.06)
    rate = throughput_samples_per_s(gpt, devices, tflops * 1e12)
    # The table's FLOP/s are hardware FLOP/s: the replay counts. Its own last column is rounded from exact TFLOP/s.
    assert rate * flops_per_iteration(gpt, 1) / 1e15 == pytest.approx(total, rel=0.004)
    assert 100 * mfu(gpt, rate, devices, 312e12, "hardware") == pytest.approx(percent, abs=0.6)
    assert mfu(gpt, rate, devices, 312e12) < mfu(gpt, rate, devices, 312e12, "hardware")


def test_the_formula_with_recompute_is_the_papers_in_one_piece():
    gpt = Gpt(96, 12288, 96)
    s, h, v = gpt.sequence, gpt.hidden, gpt.vocab
    papers = 96 * 7 * s * gpt.layers * h * h * (1 + s / (6 * h) + v / (16 * gpt.layers * h))
    assert flops_per_iteration(gpt, 7) == pytest.approx(papers, rel=1e-12)


def test_training_takes_34_and_84_days():
    assert round(training_days(num_parameters(Gpt(96, 12288, 96)), 300e9, 1024, 140e12)) == 34
    assert round(training_days(1008e9, 450e9, 3072, 163e12)) == 84


def test_activation_bytes_of_all_variants():
    gpt = Gpt(1, 1000, 10, sequence=100)
    stream = 100 * 2 * 1000
    assert activation_bytes_per_layer(gpt, 2) == stream * (34 + 5)
    assert activation_bytes_per_layer(gpt, 2, 4) == stream * (10 + 6 + 5 / 4)
    assert activation_bytes_per_layer(gpt, 2, 4, sequence_parallel=True) == stream * (34 + 5) / 4
    assert activation_bytes_per_layer(gpt, 2, 4, sequence_parallel=True, recompute="selective") == stream * 34 / 4
    assert activation_bytes_per_layer(gpt, 2, 4, recompute="full") == 2 * stream
    with pytest.raises(PlanError, match="recompute"):
        activation_bytes_per_layer(gpt, 2, recompute="some")


def test_communication_and_state_bytes():
    gpt = Gpt(1, 1000, 10, sequence=100)
    assert pipeline_bytes(gpt, 2) == 2 * 100 * 1000 * 2
    assert pipeline_bytes(gpt, 2, chunks=2, tensor=4) == pipeline_bytes(gpt, 2) / 2
    assert tensor_bytes_per_layer(gpt, 2, 4) == 8 * 2 * 100 * 1000 * 0.75 * 2
    assert data_bytes(100.0, 4) == 150.0
    assert [state_bytes_per_parameter(p) for p in ("fp32", "mixed", "mixed-fp32-grads")] == [16, 16, 18]
    assert state_bytes_per_parameter("mixed", 4) == 7
    assert bubble_over_ideal(8, 32, 2) == 7 / 64


def test_the_best_microbatch_is_a_search_and_depends_on_the_depth():
    # Large micro-batches run more efficiently; deep pipelines with few micro-batches idle more.
    forward = {1: 1.0, 2: 1.6, 4: 2.8, 8: 5.4}
    backward = {b: 2 * seconds for b, seconds in forward.items()}
    shallow, times = best_microbatch(128, 1, 2, forward, backward)
    deep, _ = best_microbatch(128, 1, 64, forward, backward)
    assert times[4] == (128 // 4 + 1) * (2.8 + 5.6)
    assert (shallow, deep) == (8, 1)
    with pytest.raises(PlanError, match="divides"):
        best_microbatch(7, 2, 2, forward, backward)


def test_a_computed_profile_has_the_parameters_and_flop_of_the_formulas():
    device = Device(flops=100e12, efficiency=1.0)
    gpt = Gpt(12, 1024, 16)
    profile = gpt_profile(12, 1024, 16, device=device, microbatch=4)
    blocks = profile.layers[1:-1]
    # The projection shares the embedding's weights and so counts once in the formula.
    weights = sum(layer.weight_bytes for layer in profile.layers[:-1]) / 2
    assert weights == pytest.approx(num_parameters(gpt), rel=1e-12)
    seconds = sum(layer.total_s for layer in profile.layers)
    assert seconds * 100e12 == pytest.approx(flops_per_iteration(gpt, 4, recompute=False), rel=1e-12)
    assert blocks[0].saved_bytes == activation_bytes_per_layer(gpt, 4)
