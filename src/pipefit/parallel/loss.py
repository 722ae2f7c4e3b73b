"""Losses over an output that is sharded along the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from pipefit.parallel.region import Region

Loss = Callable[[Any, Any], Tensor]


def shared_loss(loss: Loss, region: Region) -> Loss:
    """The loss of an output (…, V/t) of which each process has its part of the vocabulary.

    Mean cross entropy (torch's, or a loss with the attribute `is_mean_cross_entropy`) is computed on the parts: only
    three numbers per token are exchanged. For any other loss the output is gathered first.
    """
    ignored = ignored_target(loss)

    def of_parts(output: Any, target: Any) -> Tensor:
        if ignored is None or getattr(loss, "label_smoothing", False) or target.is_floating_point():
            return loss(region.join(output), target)
        return cross_entropy(output, target, region=region, ignore_index=ignored)

    return of_parts


def ignored_target(loss: Loss) -> int | None:
    """The target that a mean cross entropy leaves out of its mean; None: the loss is another one."""
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.weight is None and loss.reduction == "mean":
            return loss.ignore_index
    elif loss is F.cross_entropy or getattr(loss, "is_mean_cross_entropy", False) is True:
        return -100
    return None


def cross_entropy(logits: Tensor, target: Tensor, *, region: Region, ignore_index: int = -100) -> Tensor:
    """Mean cross entropy in nats of logits (…, V/t) and targets (…) int64, the same number on every process.

    Raises:
        IndexError: a target is no class.

    Source: Shoeybi et al. 2019 §3 (the fused, vocabulary-parallel cross entropy).
    """
    flat = target.flatten()
    counted = flat != ignore_index
    losses = _CrossEntropy.apply(logits.flatten(0, -2), flat.where(counted, 0), region)
    return (losses * counted).sum() / counted.sum()


class _CrossEntropy(Function):
    """Loss of each token: log Σ exp(logits) − logits[target]; (n, V/t) and (n,) -> (n,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, region: Region) -> Tensor:
        highest = region.sum(logits.amax(1), dist.ReduceOp.MAX, spent=True)
        shifted = logits - highest.unsqueeze(1)
        place, here = region.places(target, logits.shape[1])
        place = place.unsqueeze(1)
        picked = shifted.gather(1, place).squeeze(1) * here
        odds = shifted.exp_()
        both = region.sum(torch.stack([odds.sum(1), picked]), spent=True)
        odds /= both[0].unsqueeze(1)
        ctx.save_for_backward(odds, place, here)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        odds, place, here = ctx.saved_tensors
        result = odds * grad.unsqueeze(1)
        return result.scatter_add_(1, place, -(grad * here).unsqueeze(1)), None, None
