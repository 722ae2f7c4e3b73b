"""The halves of a backward: their times, and what lies between them."""

import pytest
import torch
from tests.profiling.small_models import DEVICE, QUICK, mlp
from torch import nn

from pipefit.models import build
from pipefit.profiling import (
    analytic_profile,
    passes,
    profile_layers,
)
from pipefit.profiling.clock import Clock
from pipefit.runtime.halves import input_half
from pipefit.spec.profile import Profile
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.slow


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
