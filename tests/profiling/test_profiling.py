"""Profiles say what is true of a model, and measuring leaves the model as it was."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.profiling.small_models import DEVICE, FIGURES, QUICK, by_name, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipefit.errors import DataError, ModelError, ProfileError
from pipefit.models import build
from pipefit.profiling import (
    analytic_profile,
    passes,
    profile_layers,
    profile_sizes,
)
from pipefit.profiling.clock import Clock
from pipefit.spec.plan import Partition
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Device
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.slow

GNMT = f"{Path(__file__).parents[2]}/examples/models/gnmt.py:gnmt"


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
    profile = profile_layers(model.layers, *model.example(2, 0)[:1], **QUICK)
    layers = by_name(profile)
    assert layers["embed"].weight_bytes == (32 + 8) * 16 * 4
    assert layers["head"].weight_bytes == (32 + 2) * 16 * 4
    # A stage that has both has the table once.
    unique = sum(parameter.nbytes for parameter in model.layers.parameters())
    assert profile.weights_of(range(3)) == (unique, unique)
    assert profile.weights_of([1, 2]) == (sum(profile.layers[i].weight_bytes for i in (1, 2)),) * 2

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
    class Watch(nn.Linear):
        def forward(self, x):
            assert self.training
            return super().forward(x)

    profile = profile_layers([Watch(3, 3).eval()], torch.randn(2, 3), **QUICK)
    assert profile.layers[0].forward_s > 0


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
    with pytest.raises(ModelError, match=r"one number .*, got a tensor of shape \[8, 3\]"):
        profile_layers(mlp(), torch.randn(8, 6), lambda y, t: y, **QUICK)
    with pytest.raises(ModelError, match=r"the loss raised .* on float32 \(8, 3\) and target int64 \(5\,\)"):
        profile_layers(mlp(), torch.randn(8, 6), F.cross_entropy, torch.zeros(5).long(), **QUICK)
    with pytest.raises(DataError, match="batch dimension"):
        profile_layers(mlp(), torch.tensor(3.0), **QUICK)
    with pytest.raises(ProfileError, match="flops"):
        analytic_profile(mlp(), torch.randn(8, 6), Device())
