"""Batch norm over micro-batches: each is normalised by its own statistics, the running averages see the mini-batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["DeferredBatchNorm", "commit", "deferred"]


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running averages move once per update, by the statistics of all its micro-batches together.

    A module becomes one by `DeferredBatchNorm.adopt`, which keeps its parameters, buffers and names; `release` gives it
    back its own class. `update` says which update the next forward's statistics belong to (several are in flight under
    an asynchronous schedule); None: to none, as in a replay.

    Source: GPipe (NeurIPS 2019) §2.1.
    """

    _own_class: type[nn.Module]
    _seen: dict[int, list[tuple[Tensor, Tensor, float]]]
    _gathered: dict[int, Tensor]
    update: int | None

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
        module.update = 0

    def release(self) -> None:
        """Gives the module back its own class."""
        own = self._own_class
        del self._own_class, self._seen, self._gathered, self.update
        self.__class__ = own

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the micro-batch's own statistics in training, by the running averages otherwise."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        normal, mean, invstd = torch.native_batch_norm(input, self.weight, self.bias, None, None, True, 0.0, self.eps)
        if self.update is not None:
            seen = mean.detach(), invstd.detach(), input.numel() / input.shape[1]
            self._seen.setdefault(self.update, []).append(seen)
        return normal

    def gathered(self, update: int) -> Tensor | None:
        """Count, sum and sum of squares (3 × channels) of an update so far; what replicas add up."""
        if seen := self._seen.pop(update, None):
            # All micro-batches at once: one by one, this would cost as much as the forward of a small layer.
            mean = torch.stack([one for one, _, _ in seen]).double()
            variance = torch.stack([one for _, one, _ in seen]).double().pow(-2) - self.eps
            counts = torch.tensor([count for _, _, count in seen], dtype=torch.float64).to(mean.device).view(-1, 1, 1)
            sums = torch.stack([torch.ones_like(mean), mean, variance + mean * mean], 1) * counts
            total = self._gathered.get(update)
            for one in sums:
                total = one if total is None else total + one
            assert total is not None
            self._gathered[update] = total
        return self._gathered.get(update)

    @torch.no_grad()
    def commit(self, update: int) -> None:
        """Moves the running averages by the mini-batch of an update, once."""
        if (gathered := self.gathered(update)) is None:
            return
        del self._gathered[update]
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean, variance = _statistics(gathered)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


_CLASSES: dict[type, type] = {}


def _deferred_class(own: type) -> type:
    if own not in _CLASSES:
        _CLASSES[own] = type(f"Deferred{own.__name__}", (DeferredBatchNorm, own), {})
    return _CLASSES[own]


def deferred(modules: Iterable[nn.Module]) -> Iterator[DeferredBatchNorm]:
    """The deferred batch norms inside some modules."""
    return (module for root in modules for module in root.modules() if isinstance(module, DeferredBatchNorm))


@torch.no_grad()
def commit(modules: Sequence[DeferredBatchNorm], update: int) -> None:
    """Moves the running averages of several batch norms by the mini-batch of an update, as `commit` of each would.

    Their channels are laid side by side: for small layers the number of operations is what costs.
    """
    modules = list(dict.fromkeys(modules))
    if len(modules) < 2 or not _alike(modules, update):
        for module in modules:
            module.commit(update)
        return
    seen = [module._seen.pop(update) for module in modules]
    sizes = [one[0][0].numel() for one in seen]
    turns = range(len(seen[0]))
    mean = torch.cat([one[turn][0] for turn in turns for one in seen]).view(len(turns), -1).double()
    invstd = torch.cat([one[turn][1] for turn in turns for one in seen]).view(len(turns), -1)
    variance = invstd.double().pow(-2) - modules[0].eps
    counts = torch.tensor([[one[turn][2] for one in seen] for turn in turns], dtype=torch.float64)
    counts = counts.repeat_interleave(torch.tensor(sizes), 1).to(mean.device).unsqueeze(1)
    sums = torch.stack([torch.ones_like(mean), mean, variance + mean * mean], 1) * counts
    means, variances = _statistics(functools.reduce(torch.add, sums))
    first = modules[0]
    assert first.running_mean is not None and first.momentum is not None
    torch._foreach_add_([module.num_batches_tracked for module in modules], 1)
    for buffers, values in (
        ([module.running_mean for module in modules], means),
        ([module.running_var for module in modules], variances),
    ):
        parts = values.to(first.running_mean.dtype).split(sizes)
        torch._foreach_lerp_(buffers, list(parts), first.momentum)


def _alike(modules: Sequence[DeferredBatchNorm], update: int) -> bool:
    """Whether all have seen as many micro-batches of the update, none summed up yet, and average in the same way."""
    kinds = {
        (
            len(m._seen.get(update, ())),
            update in m._gathered,
            m.momentum,
            m.eps,
            m.running_mean.dtype,
            m.running_mean.device,
        )
        for m in modules
        if m.running_mean is not None
    }
    if len(kinds) != 1:
        return False
    ((count, summed, momentum, *_),) = kinds
    return bool(count) and not summed and momentum is not None


def _statistics(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance from count, sum and sum of squares."""
    count, total, squares = gathered
    mean = total / count
    return mean, (squares / count - mean * mean) * (count / (count - 1).clamp(min=1))
