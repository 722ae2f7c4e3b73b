"""Modules train in the mode that their user gave them, before an evaluation and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit as pf


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


def freeze_all(model: nn.Module) -> None:
    model.eval()


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


@pytest.mark.parametrize("freeze", [freeze_all, freeze_norms])
@pytest.mark.parametrize("make", [flat, Blocks, Row])
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
        modes = [module.training for module in plain.modules()]
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held_out = F.cross_entropy(plain.eval()(x), y)
        for module, mode in zip(plain.modules(), modes, strict=True):
            module.training = mode
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
