"""The checksum of a model's structure: what it computes, whatever the values of its weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipefit.pipeline.facts import structure_of
from pipefit.profiling.workload import Workload
from pipefit.stage.split import named_layers


def workload(
    seed: int = 0, dropout: float = 0.1, width: int = 4, frozen: bool = False, half: torch.dtype | None = None
):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 2))
    model[0].requires_grad_(not frozen)
    return Workload(named_layers(model), nn.functional.mse_loss, torch.optim.SGD, torch.device("cpu"), half=half)


def test_other_values_of_weights_are_the_same_structure():
    assert structure_of(workload(seed=0)) == structure_of(workload(seed=1))


@pytest.mark.parametrize(
    "change",
    [{"dropout": 0.2}, {"width": 5}, {"frozen": True}, {"half": torch.bfloat16}],
    ids=lambda one: next(iter(one)),
)
def test_another_setting_shape_or_type_is_another_structure(change):
    assert structure_of(workload()) != structure_of(workload(**change))


def test_another_loss_is_another_structure():
    usual = workload()
    assert structure_of(usual) != structure_of(replace(usual, loss=nn.functional.l1_loss))


def test_another_forward_is_another_structure():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    usual = workload()
    before = structure_of(replace(usual, layers=named_layers(nn.Sequential(Layer(4, 4)))))

    def forward(self, x):
        return nn.Linear.forward(self, x) * 2 + x

    class Another(nn.Linear):
        pass

    Another.__qualname__ = Layer.__qualname__
    Another.forward = forward
    assert structure_of(replace(usual, layers=named_layers(nn.Sequential(Another(4, 4))))) != before


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(4, 4)
        self.scale = scale
        self.act = lambda h: h * self.scale  # takes the module itself from around

    def forward(self, x):
        return self.act(super().forward(x))


def test_a_function_of_a_module_may_take_the_module_from_around():
    found = [structure_of(replace(workload(), layers=named_layers(nn.Sequential(Scaled(s))))) for s in (0.5, 0.5, 2.0)]
    assert found[0] == found[1] != found[2]
