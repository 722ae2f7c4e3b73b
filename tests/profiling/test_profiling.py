"""Profiles say what is true of a model, and measuring leaves the model as it was."""

import math
import os
import random
import resource
import threading
import time
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipefit.cost import speeds_of
from pipefit.errors import DataError, ModelError, ProfileError, TopologyError
from pipefit.models import build
from pipefit.profiling import (
    analytic_profile,
    fit_link,
    links,
    measure_device,
    measure_links,
    passes,
    profile_layers,
    profile_sizes,
)
from pipefit.profiling.analytic import layer_costs
from pipefit.profiling.clock import Clock
from pipefit.profiling.links import ping_pong, topology_of
from pipefit.runtime.halves import input_half
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec.plan import Partition
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Device, Topology
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.slow

QUICK = {"repeats": 2, "warmup": 1}
DEVICE = Device(flops=1e12, memory_bandwidth_bytes_per_s=1e11, efficiency=0.5)
GNMT = f"{Path(__file__).parents[2]}/examples/models/gnmt.py:gnmt"
FIGURES = ("forward_s", "backward_input_s", "backward_weight_s", "output_bytes", "saved_bytes", "weight_bytes")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def by_name(profile: Profile) -> dict:
    return {layer.name: layer for layer in profile.layers}


# --------------------------------------------------------------------------------------------------------- layers


def test_a_chain_has_the_names_of_a_sequential_or_numbers():
    named = [("a", nn.ReLU()), ("b", nn.ReLU())]
    assert [layer.name for layer in named_layers(nn.Sequential(nn.ReLU(), nn.ReLU()))] == ["0", "1"]
    layers = named_layers(named)
    assert [(layer.name, layer.module) for layer in layers] == named
    assert named_layers(layers) == layers
    assert [layer.name for layer in named_layers(nn.ModuleList([nn.ReLU()]))] == ["0"]


def test_a_module_used_twice_is_two_layers():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert [layer.module for layer in named_layers(model)] == list(model)
    profile = profile_layers(model, torch.randn(2, 4), **QUICK)
    assert [layer.weight_bytes for layer in profile.layers] == [80, 0, 80]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([], "no layers"),
        (3, "expected an nn.Sequential or a list of modules, got int"),
        (nn.Linear(2, 2), "got Linear; write the model as a sequence"),
        (nn.Sequential(), "no layers"),
        ([3], "layer 0: expected an nn.Module or"),
        ([("a", nn.ReLU()), ("a", nn.ReLU())], "layers 0 and 1 are both named 'a'"),
    ],
)
def test_what_is_no_chain_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        named_layers(model)


# ------------------------------------------------------------------------------------------------ measured facts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("convnet", {"dropout": 0.2}),
        ("gpt", {"layers": 2, "hidden": 32, "context": 16, "heads": 2}),
        (GNMT, {"layers": 4, "hidden": 16, "vocab": 64, "length": 5}),
    ],
)
def test_every_built_in_kind_gives_a_finite_profile_that_survives_its_file(name, options, tmp_path):
    torch.manual_seed(0)
    bundle = build(name, **options)
    x, y = bundle.example(4, 0)
    adam = torch.optim.AdamW
    profile = profile_layers(bundle.layers, x, bundle.loss, y, optimizer=adam, model=name, **QUICK)
    assert [layer.name for layer in profile.layers] == [child for child, _ in bundle.layers.named_children()]
    for layer in profile.layers:
        assert all(math.isfinite(getattr(layer, field)) and getattr(layer, field) >= 0 for field in FIGURES)
        assert layer.forward_s > 0
    assert profile.step_s > 0
    assert profile.loss_s > 0
    assert profile.optimizer_s > 0
    assert profile.microbatch_size == 4
    assert Profile.load(profile.save(tmp_path / "p.json")) == profile


def test_bytes_of_outputs_and_weights_are_exact():
    model = mlp()
    layers = by_name(profile_layers(model, torch.randn(5, 6), **QUICK))
    assert [layers[name].output_bytes for name in "012"] == [5 * 8 * 4, 5 * 8 * 4, 5 * 3 * 4]
    assert [layers[name].weight_bytes for name in "012"] == [(6 * 8 + 8) * 4, 0, (8 * 3 + 3) * 4]


def test_saved_bytes_of_linear_and_relu_count_each_storage_once_and_no_weight():
    # The first map saves its input; the ReLU its output, which is also what the last map saves.
    layers = by_name(profile_layers(mlp(), torch.randn(5, 6), **QUICK))
    assert [layers[name].saved_bytes for name in "012"] == [5 * 6 * 4, 5 * 8 * 4, 0]


def test_views_of_one_storage_are_saved_once():
    class Halves(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            return a * b

    model = nn.Sequential(nn.Linear(4, 8, bias=False), Halves())
    assert profile_layers(model, torch.randn(3, 4), **QUICK).layers[1].saved_bytes == 3 * 8 * 4


def test_tied_weights_count_in_every_layer_that_holds_them_and_once_inside_one():
    model = build("gpt", layers=1, hidden=16, heads=2, vocab=32, context=8)
    layers = by_name(profile_layers(model.layers, *model.example(2, 0)[:1], **QUICK))
    assert layers["embed"].weight_bytes == (32 + 8) * 16 * 4
    assert layers["head"].weight_bytes == (32 + 2) * 16 * 4

    inside = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    inside[1].weight = inside[0].weight
    assert profile_layers([inside], torch.randn(2, 4), **QUICK).layers[0].weight_bytes == 64


def test_the_first_layer_has_no_input_gradient_and_a_frozen_one_no_weight_gradient():
    model = mlp()
    model[2].requires_grad_(False)
    layers = by_name(profile_layers(model, torch.randn(5, 6), **QUICK))
    assert layers["0"].backward_input_s == 0
    assert layers["0"].backward_weight_s > 0
    assert layers["2"].backward_weight_s == 0
    assert layers["2"].backward_input_s > 0
    assert layers["1"].backward_weight_s == 0


def test_layers_before_everything_trainable_have_no_backward_pass():
    model = mlp()
    model[0].requires_grad_(False)
    layers = by_name(profile_layers(model, torch.randn(5, 6), F.cross_entropy, torch.tensor([0, 1, 2, 0, 1]), **QUICK))
    assert layers["0"].backward_s == layers["1"].backward_s == 0
    assert layers["1"].grad_bytes == 0
    assert layers["2"].backward_weight_s > 0


def test_only_weights_that_train_count_for_gradients_and_steps(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    profile = profile_layers(model, torch.randn(5, 6), optimizer=torch.optim.AdamW, **QUICK)
    computed = analytic_profile(model, torch.randn(5, 6), DEVICE)
    for one in (profile, computed, Profile.load(profile.save(tmp_path / "p.json"))):
        assert [layer.weight_bytes for layer in one.layers] == [4 * 56, 4 * 72, 4 * 27]
        assert [layer.wgrad_bytes for layer in one.layers] == [0, 4 * 8, 4 * 27]
        assert [layer.wgrad_bytes for layer in one.at(7).layers] == [0, 4 * 8, 4 * 27]
        assert one.num_frozen(Partition.from_counts([1, 2])) == one.num_frozen(Partition.from_counts([1, 1, 1])) == 1
        assert one.num_frozen(Partition.from_counts([2, 1])) == 0
    assert profile.layers[0].step_s == 0 == profile.optimizer_of([0]) and profile.optimizer_of([1]) > 0
    assert profile.layers[0].saved_bytes == 0 and profile.layers[1].backward_input_s == 0


def test_more_bytes_that_train_than_there_are_is_refused():
    with pytest.raises(ProfileError, match=r"layers\[0\]\.trained_bytes: expected 0 to 8"):
        Profile("m", 1, (Layer("a", 1, 1, 1, 1, 1, 8, trained_bytes=9),))


def test_a_model_that_cannot_learn_has_forward_times_only():
    model = mlp().requires_grad_(False)
    profile = profile_layers(model, torch.randn(5, 6), **QUICK)
    assert all(layer.backward_s == 0 and layer.forward_s > 0 for layer in profile.layers)


def test_integer_parts_of_a_payload_travel_but_have_no_gradient():
    model = build(GNMT, layers=3, hidden=16, vocab=64, length=5)
    layers = by_name(profile_layers(model.layers, model.example(2, 0)[0], **QUICK))
    assert layers["embed_source"].output_bytes == 2 * 5 * 16 * 4 + 2 * 5 * 8
    assert layers["embed_source"].grad_bytes == 2 * 5 * 16 * 4
    assert layers["decoder0"].grad_bytes is None


class Wide(nn.Module):
    """A matrix product that is far dearer than anything around it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, 8)

    def forward(self, x):
        return self.down(self.middle(self.up(x)))


def test_a_value_that_skips_layers_is_counted_at_every_boundary_it_crosses():
    class Hand(nn.Module):
        """Works on the first tensor and hands on the second."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, payload):
            x, skipped = payload
            return self.line(x), skipped

    class Begin(nn.Module):
        def forward(self, x):
            return x + 1, x.repeat(1, 3)

    class End(nn.Module):
        def forward(self, payload):
            return payload[0] + payload[1].sum(dim=1, keepdim=True)

    found = profile_layers(nn.Sequential(Begin(), Hand(), Hand(), End()), torch.randn(4, 8), repeats=1)
    own, skipping = 4 * 8 * 4, 4 * 24 * 4
    assert found.cut_bytes == (own + skipping,) * 3


class Hands(Clock):
    """A clock that only moves when a layer moves it."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.time = 0
        self._now = lambda: self.time


class Takes(torch.autograd.Function):
    """Takes so many seconds of a clock, each way."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.time += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.time += ctx.backward_s
        return grad, None, None, None


class Slow(nn.Linear):
    def __init__(self, clock, forward_s, backward_s):
        super().__init__(4, 4)
        self.takes = clock, forward_s, backward_s

    def forward(self, x):
        return Takes.apply(super().forward(x), *self.takes)


def test_time_is_booked_on_the_layer_that_takes_it_and_layers_and_loss_add_up_to_the_step():
    clock = Hands()
    chain = named_layers([Slow(clock, 2, 5), Slow(clock, 30, 70), Slow(clock, 1, 3)])
    step = passes.Step(chain, torch.randn(2, 4), lambda y, _: Takes.apply(y, clock, 11, 13).sum(), None, clock)
    marked = step.marked()
    assert (marked.forward_s, marked.backward_s, marked.loss_s) == ([2, 30, 1], [5, 70, 3], 24)
    assert step.inputs_only().backward_s == [0, 70, 3], "the input of the first layer needs no gradient"
    assert step.plain() == sum(marked.forward_s + marked.backward_s) + marked.loss_s


def test_a_layer_that_works_in_place_is_measured_as_it_stands():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    layers = by_name(profile_layers(model, torch.randn(5, 6), **QUICK))
    assert layers["1"].backward_input_s > 0
    assert by_name(analytic_profile(model, torch.randn(5, 6), DEVICE))["1"].forward_s > 0


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(6, 6), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_a_layer_that_recomputes_itself_is_measured_and_refused_in_the_old_form():
    model = [nn.Linear(6, 6), Recomputed(False)]
    assert profile_layers(model, torch.randn(5, 6), **QUICK).layers[1].backward_weight_s >= 0
    with pytest.raises(ModelError, match="use_reentrant=False"):
        profile_layers([nn.Linear(6, 6), Recomputed(True)], torch.randn(5, 6), **QUICK)


def test_a_layer_that_only_hands_on_costs_no_backward_pass():
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3))
    assert by_name(profile_layers(model, torch.randn(5, 6), **QUICK))["1"].backward_s == 0


# ------------------------------------------------------------------------------------------------------ untouched


def test_weights_gradients_buffers_and_modes_are_as_before():
    model = build("convnet", dropout=0.3).layers
    model.eval()
    model[1].train()
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    x = torch.randn(4, 1, 8, 8)
    profile_layers(model, x, optimizer=torch.optim.SGD, dtype=torch.float64, **QUICK)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == objects
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(first.grad, torch.full_like(first, 7.0))
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])


def test_it_runs_in_train_mode():
    modes = []

    class Watch(nn.Linear):
        def forward(self, x):
            modes.append(self.training)
            return super().forward(x)

    profile_layers([Watch(3, 3).eval()], torch.randn(2, 3), **QUICK)
    assert modes
    assert all(modes)


def test_random_numbers_go_on_as_if_nothing_had_been_measured():
    model = build("convnet", dropout=0.5)

    def draw():
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    def seed():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    profile_layers(model.layers, model.example(4, 0)[0], **QUICK)
    analytic_profile(model.layers, model.example(4, 0)[0], DEVICE)
    assert draw() == expected


def test_a_failure_leaves_the_model_as_it_was_too():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(3, 2)).eval()
    threads = torch.get_num_threads()
    with pytest.raises(ModelError, match=r"layer '2' raised RuntimeError on float32 \(4, 2\)"):
        profile_layers(model, torch.randn(4, 3), threads=threads + 1, **QUICK)
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert not model[0].training
    assert torch.get_num_threads() == threads


def test_the_number_of_threads_is_set_for_the_while_and_written_down():
    before = torch.get_num_threads()
    assert "1 thread" in profile_layers(mlp(), torch.randn(2, 6), threads=1, **QUICK).device
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------------------------------------- sizes


def test_several_sizes_live_in_one_profile_and_its_file(tmp_path):
    profile = profile_sizes(mlp(), torch.randn(8, 6), microbatch_sizes=(4, 2, 8), **QUICK)
    assert profile.microbatch_size == 4
    assert [other.microbatch_size for other in profile.others] == [2, 8]
    assert profile.at(8).layers[0].output_bytes == 8 * 8 * 4
    assert profile.at(6).layers[0].output_bytes == 6 * 8 * 4
    assert profile.at(6).layers[0].weight_bytes == profile.layers[0].weight_bytes
    assert profile.at(4) == Profile(**{**as_fields(profile), "others": ()})
    assert Profile.load(profile.save(tmp_path / "p.json")) == profile


def as_fields(profile: Profile) -> dict:
    return {field: getattr(profile, field) for field in profile.__struct_fields__}


def test_the_first_samples_of_a_larger_example_are_taken():
    layers = profile_layers(
        mlp(), torch.randn(8, 6), F.cross_entropy, torch.zeros(8).long(), microbatch_size=3, **QUICK
    )
    assert layers.layers[0].output_bytes == 3 * 8 * 4


@pytest.mark.parametrize("size", [0, 9])
def test_a_size_that_the_example_does_not_have_is_refused(size):
    with pytest.raises(DataError, match="8 samples"):
        profile_layers(mlp(), torch.randn(8, 6), microbatch_size=size, **QUICK)


def test_a_limit_ends_the_turns_early_and_the_file_says_how_many_there_were():
    profile = profile_layers(mlp(), torch.randn(8, 6), repeats=1000, warmup=0, limit_s=0.0)
    assert "medians of 3 turns" in profile.source


def test_wrong_requests_are_refused():
    with pytest.raises(ProfileError, match="repeat"):
        profile_layers(mlp(), torch.randn(8, 6), repeats=0)
    with pytest.raises(ProfileError, match="different sizes"):
        profile_sizes(mlp(), torch.randn(8, 6), microbatch_sizes=(2, 2))
    with pytest.raises(ModelError, match=r"one number to differentiate, got a tensor of shape \(8, 3\)"):
        profile_layers(mlp(), torch.randn(8, 6), lambda y, t: y, **QUICK)
    with pytest.raises(ModelError, match=r"the loss raised .* on float32 \(8, 3\) and target int64 \(5\,\)"):
        profile_layers(mlp(), torch.randn(8, 6), F.cross_entropy, torch.zeros(5).long(), **QUICK)
    with pytest.raises(DataError, match="batch dimension"):
        profile_layers(mlp(), torch.tensor(3.0), **QUICK)
    with pytest.raises(ProfileError, match="flops"):
        analytic_profile(mlp(), torch.randn(8, 6), Device())


# ------------------------------------------------------------------------------------------------------- computed


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
    assert forward == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert weights == 24 * b * s * h**2
    # The fused attention makes its scores once more in the backward pass: five products instead of four.
    assert inputs == 24 * b * s * h**2 + 10 * b * s**2 * h


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


# ---------------------------------------------------------------------------------------------------------- links


def test_a_link_is_fitted_exactly_and_never_with_a_negative_latency():
    sizes = [1e3, 1e5, 1e7]
    latency_s, bandwidth = fit_link(sizes, [5e-5 + n / 3e9 for n in sizes])
    assert latency_s == pytest.approx(5e-5)
    assert bandwidth == pytest.approx(3e9)
    latency_s, bandwidth = fit_link([1e3, 1e6], [1e-7, 1.1e-3])
    assert latency_s == 0
    assert bandwidth > 0


@pytest.mark.parametrize(("sizes", "seconds"), [([1e3], [1.0]), ([1e3, 1e6], [2.0, 1.0]), ([1e3, 1e6], [0.0, 1.0])])
def test_times_that_say_nothing_about_a_link_are_refused(sizes, seconds):
    with pytest.raises(TopologyError):
        fit_link(sizes, seconds)


def test_samples_inside_and_between_hosts_make_two_levels():
    sizes = (1000, 1_000_000)
    inside, between = (
        [latency_s + n / bandwidth for n in sizes] for latency_s, bandwidth in ((1e-5, 1e10), (1e-3, 1e8))
    )
    times = {(0, 1): inside, (2, 3): inside, (0, 2): between}
    topology = topology_of(times, sizes, world=4, per_host=2, each=Device(), name="two hosts", cores=1)
    assert topology.machine == (2, 1)
    assert [(level.name, level.width) for level in topology.levels] == [("host", 2), ("network", 2)]
    assert [level.latency_s for level in topology.levels] == pytest.approx([1e-5, 1e-3])
    assert [level.bandwidth_bytes_per_s for level in topology.levels] == pytest.approx([1e10, 1e8])


def test_ping_and_pong_alternate():
    there, back, log = Queue(), Queue(), []

    def side(name, out, into, starts):
        def send(size):
            log.append((name, size))
            out.put(size)

        return ping_pong(send, lambda size: into.get(timeout=10), starts, (1, 2), repeats=3)

    other = threading.Thread(target=side, args=("b", back, there, False))
    other.start()
    seconds = side("a", there, back, True)
    other.join(10)
    assert log == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 5
    assert all(time > 0 for time in seconds)


def links_by_rule() -> Topology:
    """The messages are real, the times are not: on a busy machine they may say anything."""
    real = links.ping_pong

    def timed_by_rule(send, receive, starts, sizes, repeats):
        assert len(real(send, receive, starts, sizes, repeats)) == len(sizes)
        return [1e-5 + size / 1e9 for size in sizes]

    links.ping_pong = timed_by_rule
    current()
    return measure_links(sizes=(1024, 1 << 20), repeats=4)


@pytest.mark.dist
def test_every_rank_learns_the_same_links():
    first, second = launch(links_by_rule, 2, threads=1, quiet=True)
    assert first == second
    (level,) = first.levels
    assert level.width == 2
    assert level.cores == len(os.sched_getaffinity(0))
    assert level.latency_s == pytest.approx(1e-5)
    assert level.bandwidth_bytes_per_s == pytest.approx(1e9)


def links_with_a_slow_rank() -> Topology:
    """A product takes rank 1 much longer."""
    if current().rank == 1:
        fast = torch.mm

        def slow(*matrices):
            time.sleep(0.2)
            return fast(*matrices)

        torch.mm = slow
    return links_by_rule()


@pytest.mark.dist
def test_links_know_the_rank_that_is_slow():
    first, second = launch(links_with_a_slow_rank, 2, threads=1, quiet=True)
    assert first == second
    fast, slow = first.devices
    assert first.device == fast and slow.flops < fast.flops / 2
    assert speeds_of(first) == pytest.approx((1.0, slow.flops / fast.flops))


def test_a_device_is_measured_in_its_own_units():
    device = measure_device(ranks=2, repeats=1)
    assert device.flops > 1e8
    assert device.memory_bandwidth_bytes_per_s > 1e7
    assert 0 < device.memory_bytes < 1e13


def test_what_a_halved_backward_keeps_is_what_enters_products():
    bundle = build("gpt", hidden=16, layers=2, heads=2, context=8, vocab=11)
    x, y = bundle.example(3, 0)
    numbers = 3 * 8 * 16 * 4  # bytes of a micro-batch of vectors
    measured = profile_layers(bundle.layers, x, bundle.loss, y, **QUICK)
    computed = analytic_profile(bundle.layers, x, DEVICE, bundle.loss, y)
    for profile in (measured, computed):
        kept = [layer.half_bytes for layer in profile.layers]
        vectors = 4 * 16 * 4  # the gradients of two norms are there already
        assert kept[1:3] == [9 * numbers + vectors] * 2  # products of width 3, 1, 4 and 1
        assert kept[0] == numbers  # nothing learns before it: its second half is the whole backward
        assert Profile.at(profile, 6).layers[1].half_bytes == 2 * (9 * numbers + vectors)


def test_what_halves_of_a_backward_take_beyond_a_whole_one_is_told_where_there_are_halves():
    x = torch.randn(5, 6)
    frozen = mlp()
    frozen[2].requires_grad_(False)
    first, relu, last = profile_layers(mlp(), x, **QUICK).layers
    assert first.split_s == relu.split_s == 0 <= last.split_s
    assert profile_layers(frozen, x, **QUICK).layers[2].split_s == 0
    in_place = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True))
    assert all(layer.split_s is not None for layer in profile_layers(in_place, x, **QUICK).layers)


def test_the_halves_of_a_layer_are_timed_on_its_own_graph(monkeypatch):
    """Autograd looks through all that lies below, and in a stage of its own nothing does."""
    sizes = []

    def noted(saved, grads):
        seen, stack = set(), [edge.node for edge in saved.edges]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += [child for child, _ in node.next_functions if child is not None]
        sizes.append(len(seen))
        return input_half(saved, grads)

    monkeypatch.setattr(passes, "input_half", noted)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    step = passes.Step(named_layers(layers), torch.randn(2, 6), None, None, Clock(torch.device("cpu")))
    assert len(step.halved()) == 5
    assert len(set(sizes[:-1])) == 1
