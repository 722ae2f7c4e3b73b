"""A cut that takes long says once what it does, on the first rank only."""

import math

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.cutting import as_layers, notice


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Repeated(nn.Module):
    """Weights without blocks: cut in its graph."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = (x @ weight).relu()
        return x


def said(caplog):
    """The lines of pipefit; torch writes its own while it traces."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("pipefit")]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Blocks, "proving the layers of Blocks with the example: layer 1 of 5 (fewer samples take less time)"),
        (Repeated, "tracing the graph of Repeated to cut it"),
    ],
)
def test_a_long_cut_says_once_what_it_does(kind, line, monkeypatch, caplog):
    monkeypatch.setattr(notice, "AFTER_S", 0.0)
    pf.cut(kind(), torch.randn(2, 4))
    assert said(caplog) == [line]


def test_a_sequence_that_takes_long_says_so_too(monkeypatch, caplog):
    monkeypatch.setattr(notice, "AFTER_S", 0.0)
    as_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4), None))
    assert said(caplog) == [
        "proving the layers of Sequential with the example: layer 1 of 2 (fewer samples take less time)"
    ]


@pytest.mark.parametrize("kind", [Blocks, Repeated])
def test_a_quick_cut_says_nothing(kind, monkeypatch, caplog):
    monkeypatch.setattr(notice, "AFTER_S", math.inf)
    pf.cut(kind(), torch.randn(2, 4))
    assert not said(caplog)


def test_other_ranks_than_the_first_say_nothing(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(notice, "AFTER_S", 0.0)
    pf.cut(Blocks(), torch.randn(2, 4))
    assert not said(caplog)
