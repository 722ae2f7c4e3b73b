"""Embeddings with sparse gradients, and weights without a shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.errors import ModelError

COPIES = pf.Parallelism(ranks=4, replicas=2)


@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, 0.0), ({}, 0.1), ({"schedule": "zb-h1"}, 0.0), ({"parallelism": COPIES}, 0.0)],
)
def test_sparse_gradients_train_as_in_plain_torch(options: dict[str, Any], clip: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randint(11, (8,)), torch.randint(3, (8,))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = []
    for _ in range(3):
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())

    pipe = pf.Pipeline(
        model,
        loss=F.cross_entropy,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        stages=2,
        updates=pf.Updates(clip_norm=clip),
        **options,
    )
    found = [pipe.step(x, y) for _ in range(3)]
    assert found == pytest.approx(wanted, rel=1e-6 if clip else 1e-12)


def test_a_sequence_with_lazy_layers_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3))
    batch = torch.randn(4, 2), torch.randint(3, (4,))
    with pytest.raises(ModelError, match=r"layer 0 has weights without a shape yet: call it once on a batch"):
        pf.Pipeline(
            model,
            loss=F.cross_entropy,
            optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
            stages=2,
            example=batch,
        )
