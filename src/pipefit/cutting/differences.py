"""Differences between two runs of a model: of values, and of the gradients of every weight."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.stage.payload import leaves_of


def worst_difference(got: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    """The largest relative difference, if it is more than rounding; or a difference of structure or shape."""
    if len(got) != len(wanted):
        return f"its structure ({len(got)} values, {len(wanted)} wanted)"
    for mine, other in zip(got, wanted, strict=True):
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            if not same_leaf(mine, other):
                return f"a {type(mine).__name__} ({mine!r:.40}, {other!r:.40} wanted)"
            continue
        if mine.layout != torch.strided or other.layout != torch.strided:
            mine, other = mine.to_dense(), other.to_dense()
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return f"its shape ({list(mine.shape)}, {list(other.shape)} wanted)"
        if not mine.is_floating_point():
            if not torch.equal(mine, other):
                return "whole numbers"
            continue
        mine, other = mine.detach(), other.detach()
        far = (mine - other).abs()
        if other.numel():
            scale = float(other.abs().nan_to_num(0, 0, 0).max())
        else:
            scale = 0.0
        same = (mine == other) | (mine.isnan() & other.isnan())
        if (~same).any():
            distance = float(far[~same].max())
        else:
            distance = 0.0
        if not distance <= 1e3 * torch.finfo(mine.dtype).eps * max(scale, 1e-30):
            if distance != distance:
                return "NaN"
            return f"{distance / max(scale, 1e-30):.1e}"
    return None


def same_leaf(a: Any, b: Any) -> bool:
    """Returns whether two leaves are equal, as far as that can be known."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a is b or not isinstance(a, bool | int | float | str | None) or bool(a == b)


def compared_sums(got: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor] | None) -> str | None:
    """The first weight whose gradients' sums differ by more than rounding, for people.

    Args:
        got: of the layers; None: no gradient reaches a weight.
        wanted: of the whole model.
    """
    if got is None or wanted is None:
        if got is wanted:
            return None
        return "its output has a gradient only in the layers, or only in the whole model"
    scale = max((float(sums.abs().nan_to_num(0).max()) for sums in wanted.values() if sums.numel()), default=0.0)
    for name in {**wanted, **got}:
        one = next(sums[name] for sums in (wanted, got) if name in sums)
        mine, other = (sums.get(name, torch.zeros_like(one)) for sums in (got, wanted))
        # NaN in the whole model too is not a mistake of the cut.
        far = torch.where(mine.isnan() & other.isnan(), 0, mine - other).abs()
        if far.numel():
            distance = float(far.max())
        else:
            distance = 0.0
        most = max(float(other.abs().nan_to_num(0).max()) if other.numel() else 0.0, scale / 100)
        if not distance <= 1e4 * torch.finfo(one.dtype).eps * most:
            return f"the gradient of {name} differs from the whole model's by {distance / most:.1e}"
    return None


def sums_of_gradients(model: nn.Module, payload: Any) -> dict[str, Tensor] | None:
    """Weighted sums along the rows of each weight's gradient, which is freed at once; None: nothing is trained.

    So the gradients of a large model are never all in memory at the same time.
    """
    every = leaves_of(payload, "the output of the model")
    leaves = [leaf for leaf in every if isinstance(leaf, Tensor) and leaf.requires_grad]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not leaves or not trained:
        return None
    sums: dict[str, Tensor] = {}
    before = [(parameter, parameter.grad) for _, parameter in trained]

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided:
            grad = parameter.grad.to_dense()
        else:
            grad = parameter.grad
        rows = grad.reshape(len(parameter) if parameter.dim() > 1 and parameter.numel() else 1, -1)
        found = rows @ _uneven(rows.shape[1], rows)
        # A checkpoint within the model may have a backward of its own, which adds to a gradient later.
        if name in sums:
            sums[name] = sums[name] + found
        else:
            sums[name] = found
        parameter.grad = None

    for _, parameter in trained:
        parameter.grad = None
    handles = [p.register_post_accumulate_grad_hook(functools.partial(keep, name)) for name, p in trained]
    try:
        torch.autograd.backward(leaves, [_uneven(leaf.numel(), leaf).view(leaf.shape) for leaf in leaves])
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in before:
            parameter.grad = grad
    return sums


def _uneven(count: int, like: Tensor) -> Tensor:
    """Weights that differ, so that two errors do not cancel."""
    return torch.linspace(0.5, 1.5, count).to(like)
