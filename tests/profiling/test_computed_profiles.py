"""Profiles that are computed from shapes and a device, without a run."""

import resource

import pytest
import torch
from tests.profiling.small_models import DEVICE, QUICK, mlp
from tests.profiling.test_profiling import GNMT
from torch import nn

from pipefit.models import build
from pipefit.profiling import (
    analytic_profile,
    profile_layers,
)
from pipefit.profiling.analytic import layer_costs
from pipefit.spec.topology import Device
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.slow


def flops_of(layer, x, input_gradient=True):
    """FLOP of forward, input gradient and weight gradient; something trainable precedes it."""
    before = nn.Linear(x.shape[-1], x.shape[-1], bias=input_gradient).requires_grad_(input_gradient)
    # A device of one FLOP per second, whose memory takes no time.
    found = layer_costs(named_layers([before, layer]), x, Device(flops=1.0, efficiency=1.0), len(x))[1].layer
    return found.forward_s, found.backward_input_s, found.backward_weight_s


def test_flops_of_a_linear_layer_are_exact():
    product = 2 * 7 * 6 * 8
    assert flops_of(nn.Linear(6, 8), torch.zeros(7, 6)) == (product, product, product)
    assert flops_of(nn.Linear(6, 8), torch.zeros(7, 6), input_gradient=False) == (product, 0, product)


def test_flops_of_a_transformer_block_are_those_of_its_products():
    b, s, h = 2, 16, 32
    block = build("gpt", layers=1, hidden=h, heads=4, context=s).layers[1]
    forward, inputs, weights = flops_of(block, torch.zeros(b, s, h))
    # Of the scores of causal attention only half are computed.
    assert forward == 24 * b * s * h**2 + 2 * b * s**2 * h
    assert weights == 24 * b * s * h**2
    # The fused attention makes its scores once more in the backward pass: five products instead of four.
    assert inputs == 24 * b * s * h**2 + 5 * b * s**2 * h


def test_the_time_of_a_large_product_is_its_flops_over_what_the_device_reaches():
    linear, x = nn.Linear(4096, 4096, bias=False), torch.empty(512, 4096, device="meta")
    layer = analytic_profile([linear], x, DEVICE).layers[0]
    assert layer.forward_s == pytest.approx(2 * 512 * 4096**2 / 0.5e12)


def test_the_time_of_an_activation_is_its_bytes_over_the_bandwidth():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    layer = analytic_profile(model, torch.zeros(128, 64), DEVICE).layers[1]
    assert layer.forward_s == pytest.approx(2 * 128 * 64 * 4 / 1e11)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"layers": 3, "hidden": 32, "context": 16, "heads": 2}),
        (GNMT, {"layers": 4, "hidden": 16, "vocab": 64, "length": 5}),
        ("convnet", {}),
    ],
)
def test_computed_bytes_are_the_measured_ones(name, options):
    model = build(name, **options)
    x, y = model.example(4, 0)
    measured = profile_layers(model.layers, x, model.loss, y, **QUICK)
    computed = analytic_profile(model.layers, x, DEVICE, model.loss, y)
    for field in ("name", "output_bytes", "grad_bytes", "weight_bytes"):
        assert [getattr(a, field) for a in measured.layers] == [getattr(b, field) for b in computed.layers]
    if name == "gpt":  # no storage is saved by two of its layers, and no fused recurrence keeps a workspace
        assert [a.saved_bytes for a in measured.layers] == [b.saved_bytes for b in computed.layers]
    assert computed.layers[0].backward_input_s == measured.layers[0].backward_input_s == 0


def test_equal_blocks_cost_the_same_and_unequal_ones_do_not():
    model = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Dropout(0.0), nn.Dropout(0.5)]
    layers = analytic_profile(model, torch.zeros(4, 8).requires_grad_(), DEVICE).layers
    assert layers[1].total_s > layers[2].total_s
    assert layers[2].backward_weight_s == 0
    assert layers[4].forward_s > layers[3].forward_s


def test_half_precision_halves_the_bytes():
    full = analytic_profile(mlp(), torch.zeros(4, 6), DEVICE)
    half = analytic_profile(mlp(), torch.zeros(4, 6), DEVICE, dtype=torch.bfloat16)
    assert [2 * a.weight_bytes for a in half.layers] == [b.weight_bytes for b in full.layers]
    assert [2 * a.output_bytes for a in half.layers] == [b.output_bytes for b in full.layers]


def test_a_model_of_a_trillion_parameters_is_profiled_without_memory():
    size = {"layers": 128, "hidden": 25600, "heads": 160, "vocab": 51200, "context": 2048, "tied": False}
    ids = torch.zeros(2, 2048, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        layers = build("gpt", **size).layers
    profile = analytic_profile(
        layers,
        ids,
        Device(flops=312e12, memory_bandwidth_bytes_per_s=2e12),
        microbatch_size=1,
        dtype=torch.bfloat16,
    )
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(profile) == 130
    assert sum(layer.weight_bytes for layer in profile.layers) > 2e12
    assert grown_kib < 500 * 2**10
    block = profile.layers[1]
    products = 24 * 2048 * 25600**2 + 4 * 2048**2 * 25600
    assert block.forward_s == pytest.approx(products / 156e12, rel=0.05)
    assert block.output_bytes == 2048 * 25600 * 2
