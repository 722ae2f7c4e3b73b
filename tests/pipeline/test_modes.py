"""Modules train in the mode that their user gave them, before an evaluation and after it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.errors import ModelError


def flat() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Row(nn.Module):
    """It has no list of blocks, so it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))


class Merged(nn.Linear):
    """Adds an adapter, in evaluation mode to the weight itself, as loralib does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.adapter = nn.Parameter(torch.randn(outputs, inputs) / 4)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merged:
        if self.is_merged == mode:
            with torch.no_grad():
                self.weight += self.adapter if not mode else -self.adapter
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_merged:
            return super().forward(x)
        return super().forward(x) + F.linear(x, self.adapter)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(Merged(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def freeze_one(model: nn.Module) -> None:
    model.get_submodule("blocks.1").eval()


def freeze_all(model: nn.Module) -> None:
    model.eval()


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


@pytest.mark.parametrize(
    ("make", "freeze"),
    [*itertools.product([flat, Blocks, Row], [freeze_all, freeze_norms]), (Adapted, freeze_one)],
)
def test_an_evaluation_leaves_frozen_modules_frozen(
    make: Callable[[], nn.Module], freeze: Callable[[nn.Module], None]
) -> None:
    torch.manual_seed(0)
    model = make().double()
    freeze(model)
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 6, (4,))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = []
    for _ in range(2):
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held_out = F.cross_entropy(copy.deepcopy(plain).eval()(x), y)
        wanted += [loss.item(), held_out.item()]

    pipe = pf.Pipeline(
        model,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=2,
        microbatches=1,
        example=(x, y),
    )
    found = []
    for _ in range(2):
        found += [pipe.step(x, y), pipe.evaluate([(x, y)])]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_graph_that_misses_a_merge_is_refused_and_the_model_stays_as_it_was() -> None:
    class Sums(Adapted):
        """Each block's input is used after it too, so it is traced."""

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + torch.tanh(block[0](x))
            return x

    torch.manual_seed(0)
    model = Sums().double()
    before = copy.deepcopy(model.state_dict())
    example = torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 6, (4,))
    with pytest.raises(ModelError, match="its evaluation differs from the whole model's"):
        pf.Pipeline(model, loss=F.cross_entropy, optimizer=torch.optim.SGD, stages=2, example=example)
    torch.testing.assert_close(model.state_dict(), before)
