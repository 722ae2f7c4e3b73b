"""A rank has the weights of its own layers only: what a cut's layers need besides is refused or stood in for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipefit as pf
from pipefit.cutting import as_layers
from pipefit.errors import ModelError
from pipefit.stage.materialise import forget_others
from tests.zoo.hand.flow import SkipsCall


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class BufferBetween(Host):
    """Its own code between the blocks uses a saved buffer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(8).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) @ self.mix
        return self.head(h)


class SparseBetween(BufferBetween):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mix", self.mix.to_sparse(), persistent=persistent)


class ParametersInList(nn.Module):
    """Weights in a container that is never called, used by the code between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(8, 8), "mid": Block(), "out": nn.Linear(8, 3)})
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), scale)) for scale in (1.0, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["in"](x)
        for scale in self.scales:
            h = torch.tanh(h * scale)
        return self.parts["out"](self.parts["mid"](h))


class ListGiven(nn.Module):
    """Gives a block a list of tensors; its output has the shape of none of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Pair(2 ** (place + 3)) for place in range(3))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        pair = [self.embed(x)]
        for block in self.blocks:
            pair = block(pair)
        return self.head(pair[0])


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, pair: list[Tensor]) -> list[Tensor]:
        output = torch.tanh(self.linear(pair[0]))
        return [output, output * pair[-1].mean()]


def hooked() -> nn.Module:
    """A model whose graph cannot be had, cut before the first of its blocks and after the last."""
    model = Host()
    model.blocks[1].register_full_backward_hook(lambda module, given, got: tuple(0.5 * one for one in given))
    return model


@pytest.mark.parametrize(
    "make",
    [BufferBetween, lambda: SparseBetween(persistent=False), ParametersInList, ListGiven, hooked],
    ids=["buffer", "sparse", "parameters", "list", "hook"],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_each_part_runs_without_the_weights_of_the_others_and_on_another_number_of_samples(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    made = pf.cut(model, torch.randn(4, 8))
    x = torch.randn(3, 8)
    wanted = model(x)
    for border in range(1, len(made)):
        first, second = copy.deepcopy(made), copy.deepcopy(made)
        forget_others(first.layers, set(range(border)))
        forget_others(second.layers, set(range(border, len(made))))
        payload: Any = x
        for part, layers in ((first, made.layers[:border]), (second, made.layers[border:])):
            for layer in layers:
                payload = part.layers[layer.index].module(payload)
        torch.testing.assert_close(payload, wanted)


def test_a_saved_sparse_buffer_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"mix is a sparse tensor.*persistent=False"):
        pf.cut(SparseBetween(persistent=True), torch.randn(4, 8))


def test_a_saved_sparse_buffer_is_refused_in_a_sequence_too() -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("mix", torch.eye(4).to_sparse())
    with pytest.raises(ModelError, match=r"1\.mix is a sparse tensor"):
        as_layers(nn.Sequential(nn.Linear(4, 4), layer))


def test_calls_that_depend_on_chance_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="must not depend on"):
        pf.cut(SkipsCall(), torch.randn(4, 8))
