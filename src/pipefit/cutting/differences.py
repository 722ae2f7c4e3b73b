"""Differences between two runs of a model: of values, and of the gradients of every weight."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.stage.payload import leaves_of

Sums = Mapping[str, Tensor] | None
"""Weighted sums of the gradient of each weight, by name; None: nothing is trained."""


def worst_difference(got: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    """The first relative difference that is more than rounding; or a difference of structure or shape."""
    if len(got) != len(wanted):
        return f"its structure ({len(got)} values, {len(wanted)} wanted)"
    for mine, other in zip(got, wanted, strict=True):
        difference = _difference(mine, other)
        if difference is not None:
            return difference
    return None


def _difference(mine: Any, other: Any) -> str | None:
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        if same_leaf(mine, other):
            return None
        return f"a {type(mine).__name__} ({mine!r:.40}, {other!r:.40} wanted)"
    mine = _dense(mine)
    other = _dense(other)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return f"its shape ({list(mine.shape)}, {list(other.shape)} wanted)"
    if not mine.is_floating_point():
        if torch.equal(mine, other):
            return None
        return "whole numbers"
    same = (mine == other) | (mine.isnan() & other.isnan())
    far = (mine - other)[~same]
    distance = _largest(far)
    scale = max(_largest(other.nan_to_num(0, 0, 0)), 1e-30)
    if distance <= 1e3 * torch.finfo(mine.dtype).eps * scale:
        return None
    if distance != distance:
        return "NaN"
    return f"{distance / scale:.1e}"


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach()


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; 0 where there is none."""
    if tensor.numel():
        return float(tensor.abs().max())
    return 0.0


def same_leaf(a: Any, b: Any) -> bool:
    """Returns whether two leaves are equal, as far as that can be known."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a is b or not isinstance(a, bool | int | float | str | None) or bool(a == b)


def compared_sums(got: Sums, wanted: Sums) -> str | None:
    """The first weight whose gradients' sums differ by more than rounding, for people.

    Args:
        got: the sums that the layers gave.
        wanted: the sums that the whole model gave.
    """
    if got is None or wanted is None:
        if got is wanted:
            return None
        return "its output has a gradient only in the layers, or only in the whole model"
    scale = max((_largest(sums.nan_to_num(0)) for sums in wanted.values()), default=0.0)
    for name, like in {**wanted, **got}.items():
        zero = torch.zeros_like(like)
        mine = got.get(name, zero)
        other = wanted.get(name, zero)
        # NaN in the whole model too is not a mistake of the cut.
        both_nan = mine.isnan() & other.isnan()
        distance = _largest(torch.where(both_nan, 0, mine - other))
        most = max(_largest(other.nan_to_num(0)), scale / 100)
        if not distance <= 1e4 * torch.finfo(like.dtype).eps * most:
            return f"the gradient of {name} differs from the whole model's by {distance / most:.1e}"
    return None


def sums_of_gradients(model: nn.Module, payload: Any) -> Sums:
    """Weighted sums along the rows of each weight's gradient, which is freed at once.

    So the gradients of a large model are never all in memory at the same time.
    """
    every = leaves_of(payload)
    leaves = [leaf for leaf in every if isinstance(leaf, Tensor) and leaf.requires_grad]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not leaves or not trained:
        return None
    sums: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = _dense(parameter.grad)
        num_rows = 1
        if parameter.dim() > 1 and parameter.numel():
            num_rows = len(parameter)
        rows = grad.reshape(num_rows, -1)
        # A checkpoint within the model may have a backward of its own, which adds to a gradient later.
        sums[name] = sums.get(name, 0) + rows @ _uneven(rows.shape[1], rows)
        parameter.grad = None

    before = []
    handles = []
    for name, parameter in trained.items():
        before.append((parameter, parameter.grad))
        parameter.grad = None
        hook = functools.partial(keep, name)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    gradients = [_uneven(leaf.numel(), leaf).view(leaf.shape) for leaf in leaves]
    try:
        torch.autograd.backward(leaves, gradients)
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in before:
            parameter.grad = grad
    return sums


def _uneven(count: int, like: Tensor) -> Tensor:
    """Weights that differ, so that two errors do not cancel."""
    return torch.linspace(0.5, 1.5, count).to(like)
