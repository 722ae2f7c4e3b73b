"""The update of batch norms: their running averages take the statistics of all micro-batches, once per update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipefit.stage.batchnorm import COUNTER, RunningAverages, share_of, sums_of


@torch.no_grad()
def update_averages(norms: Sequence[RunningAverages], update: int) -> None:
    """Updates the running averages of batch norms by the mini-batch of an update: once, or once for each call.

    The channels of similar ones are concatenated: for small layers the number of operations determines the time.
    """
    for number in range(max((norm.num_calls(update) for norm in norms), default=0)):
        alike: dict[tuple[object, ...], list[RunningAverages]] = {}
        for norm in norms:
            if number < norm.num_calls(update):
                alike.setdefault(_kind(norm, update, number), []).append(norm)
        for (share, *_), group in alike.items():
            assert isinstance(share, float)
            _update(group, sums_of(group, update, number), share)
            _count(norm for norm in group if (last := norm.last.get(number)) is None or last.counted)
    for norm in norms:
        norm.forget(update)


def _kind(norm: RunningAverages, update: int, number: int) -> tuple[object, ...]:
    """The figures that norms have in common if they are updated together: first the share."""
    seen = norm.seen(update, number)
    mean = norm.module._buffers["running_mean"]
    assert mean is not None
    last = norm.last.get(number)
    eps = norm.module.eps
    share = None
    if last is not None:
        eps = last.eps
        share = last.share
    if share is None:
        share = share_of(norm.module, 1)
    is_gathered = norm.sums(update, number) is not None
    return float(share), eps, mean.dtype, mean.device, len(seen), is_gathered


def _update(norms: Sequence[RunningAverages], sums: Tensor, share: float) -> None:
    """Moves the averages of norms to the statistics in sums, which `sums_of` gave, by a share."""
    count, total, distances, squares = sums
    mean = total / count
    # Of one group exactly 0; of several copies of a stage a difference that rounding must not make negative.
    between = (squares - total * mean).clamp(min=0)
    variance = (distances + between) / (count - 1).clamp(min=1)
    sizes = [norm.num_channels for norm in norms]
    for name, values in (("running_mean", mean), ("running_var", variance)):
        buffers: list[Any] = [norm.module._buffers[name] for norm in norms]
        torch._foreach_lerp_(buffers, list(values.to(buffers[0].dtype).split(sizes)), share)


def _count(norms: Iterable[RunningAverages]) -> None:
    """Adds one to the counters of batch norms that have one."""
    counters = [counter for norm in norms if (counter := norm.module._buffers.get(COUNTER)) is not None]
    if counters:
        torch._foreach_add_(counters, 1)
