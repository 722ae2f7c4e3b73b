"""Batch norm over micro-batches: each is normalised by its own statistics; running averages use the mini-batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running averages change once per update, by the statistics of all its micro-batches together.

    `DeferredBatchNorm.adopt` turns a module into one and keeps its parameters, buffers and names; `release` restores
    its own class. `begin` and `count` stand around a forward and take its statistics: torch.compile can follow a list
    that is empty at the start, but not a table that grows.

    Source: GPipe (NeurIPS 2019) §2.1.
    """

    _own_class: type[nn.Module]
    _seen: dict[int, list[tuple[Tensor, Tensor, float]]]
    _gathered: dict[int, Tensor]
    _fresh: list[tuple[Tensor, Tensor, float]] | None

    @staticmethod
    def adopt(module: _BatchNorm) -> None:
        """Turns a batch norm that tracks running statistics into a deferred one, in place."""
        if isinstance(module, DeferredBatchNorm) or not module.track_running_stats or module.running_mean is None:
            return
        own = type(module)
        module.__class__ = _deferred_class(own)
        module._own_class = own
        module._seen = {}
        module._gathered = {}
        module._fresh = None

    def release(self) -> None:
        """Restores the module's own class."""
        own = self._own_class
        del self._own_class, self._seen, self._gathered, self._fresh
        self.__class__ = own

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the micro-batch's own statistics in training, by the running averages otherwise."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        normal, mean, invstd = torch.native_batch_norm(input, self.weight, self.bias, None, None, True, 0.0, self.eps)
        if self._fresh is not None:
            self._fresh.append((mean.detach(), invstd.detach(), input.numel() / input.shape[1]))
        return normal

    def begin(self) -> None:
        """A forward begins, whose statistics `count` will ask for."""
        self._fresh = []

    def count(self, update: int | None) -> None:
        """Counts the forward's statistics for an update (several are in flight without a flush); None: for none."""
        if self._fresh and update is not None:
            self._seen.setdefault(update, []).extend(self._fresh)
        self._fresh = None

    def gathered(self, update: int) -> Tensor | None:
        """Count, sum and sum of squares (3 × channels) of an update so far, which replicas add up."""
        if update in self._seen:
            self._gathered[update] = _sums([self], update)
        return self._gathered.get(update)


@functools.cache
def _deferred_class(own: type) -> type:
    return type(f"Deferred{own.__name__}", (DeferredBatchNorm, own), {})


@torch.no_grad()
def commit(modules: Sequence[DeferredBatchNorm], update: int) -> None:
    """Updates the running averages of batch norms by the mini-batch of an update, once.

    The channels of similar ones are concatenated: for small layers the number of operations determines the time.
    """
    alike: dict[tuple[object, ...], list[DeferredBatchNorm]] = {}
    for module in dict.fromkeys(modules):
        if update in module._seen or update in module._gathered:
            mean = module.running_mean
            assert mean is not None and module.num_batches_tracked is not None
            module.num_batches_tracked += 1
            share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
            seen = len(module._seen.get(update, ()))
            kind = (share, module.eps, mean.dtype, mean.device, seen, update in module._gathered)
            alike.setdefault(kind, []).append(module)
    for (share, *_), group in alike.items():
        sizes = [module.num_features for module in group]
        count, total, squares = _sums(group, update)
        mean = total / count
        variance = (squares - total * mean) / (count - 1).clamp(min=1)
        for name, values in (("running_mean", mean), ("running_var", variance)):
            buffers = [getattr(module, name) for module in group]
            torch._foreach_lerp_(buffers, list(values.to(buffers[0].dtype).split(sizes)), share)


def forget(modules: Sequence[DeferredBatchNorm], update: int) -> None:
    """Drops the statistics of an update that is not made."""
    for module in modules:
        module._seen.pop(update, None)
        module._gathered.pop(update, None)


def _sums(modules: Sequence[DeferredBatchNorm], update: int) -> Tensor:
    """Takes count, sum and sum of squares (3 × channels) from modules with the same micro-batches of an update."""
    gathered = None
    if update in modules[0]._gathered:
        gathered = torch.cat([module._gathered.pop(update) for module in modules], 1)
    if update not in modules[0]._seen:
        assert gathered is not None
        return gathered
    # All micro-batches at once: one by one, this would cost as much as the forward of a small layer.
    micro_batches = list(zip(*(module._seen.pop(update) for module in modules), strict=True))
    mean, invstd = (
        torch.cat([one[part] for of in micro_batches for one in of]).double().view(len(micro_batches), -1)
        for part in (0, 1)
    )
    squares = invstd.pow(-2).sub_(modules[0].eps).addcmul_(mean, mean)
    counts = torch.tensor([[count for *_, count in of] for of in micro_batches], dtype=torch.float64)
    if len(modules) > 1:
        counts = counts.repeat_interleave(torch.tensor([module.num_features for module in modules]), 1)
    sums = torch.stack([torch.ones_like(mean), mean, squares], 1).mul_(counts.to(mean.device).unsqueeze(1)).sum(0)
    return sums if gathered is None else sums + gathered
