"""Training by a pipeline against training by torch alone: the same model, other data than the example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipefit as pf

SCALES = (1.0, 20.0, 0.05)
"""Factors of the data: what holds for the example by chance does not hold for all of them."""

Batches = Callable[[int], tuple[Any, Any]]
"""From a seed to (input, target)."""


def doubled(tree: Any, scale: float = 1.0) -> Any:
    """A batch in float64, times a factor."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() * scale if t.is_floating_point() else t, tree)


def called(model: nn.Module, batch: Any) -> Any:
    """The output of a model for a batch: keyword arguments, positional ones, or a single one."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def descend(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(parameters, 0.05)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64, the same each time."""
    torch.manual_seed(0)
    return kind().double()


def trained(kind: Callable[[], nn.Module], data: list[tuple[Any, Any]], loss: Any) -> tuple[list[float], nn.Module]:
    """The losses and the model of a training by torch."""
    model, losses = made(kind), []
    optimizer = descend([p for p in model.parameters() if p.requires_grad])
    for x, y in copy.deepcopy(data):
        optimizer.zero_grad()
        value = loss(called(model, x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model


def check_trains_as_torch(kind: Callable[[], nn.Module], batches: Batches, loss: Any, **options: Any) -> pf.Cut:
    """Asserts that a cut model trains like the model itself, at all scales, in stages of one micro-batch each.

    Args:
        kind: makes the model.
        batches: its data.
        loss: from output and target to a number.
        options: of the pipeline.

    Returns:
        The cut.
    """
    for scale in SCALES:
        data = [(doubled(x, scale), doubled(y)) for x, y in map(batches, range(1, 4))]
        wanted, whole = trained(kind, data, loss)
        cut = pf.cut(made(kind), doubled(batches(0)[0]))
        pipe = pf.Pipeline(cut, loss=loss, optimizer=descend, **{"stages": 2, "microbatches": 1, **options})
        losses = [float(pipe.step(x, y)) for x, y in data]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=1e-9)
        state = pipe.state_dict()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
            )
    return cut
