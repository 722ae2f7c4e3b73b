"""Weights of the meta device that get memory, and the names of a stage's buffers."""

import torch
from torch import nn

import pipefit as pf
from pipefit.stage.materialise import materialise
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import Stage

CPU = torch.device("cpu")


def test_one_weight_under_two_names_of_a_module_stays_one() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
        layer.again = layer.weight
    materialise([NamedLayer(0, "layer", layer)], 0, CPU)
    assert layer.again is layer.weight
    assert not layer.again.is_meta


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.body:
            x = layer(x)
        return x


def test_a_buffer_of_a_cut_model_itself_has_its_own_name() -> None:
    layers = pf.cut(Scaled(), torch.randn(2, 4)).layers
    stage = Stage(0, layers[:1], CPU)
    assert dict(stage.saved_buffers()).keys() == {"scale"}
