"""Batch norm over micro-batches: each is normalised by its own statistics; running averages use the mini-batch.

The module's own forward runs, whatever it is. While it runs, copies are in the place of its running averages:

    F.batch_norm(x, copies, …)     normalises and changes the copies, as in torch; its statistics are noted
    other code                     reads the copies: what torch would have there
    update                         the averages take the statistics of all micro-batches at once (batchnorm_update.py)

A forward that is torch's own has a shorter way to the same, which `torch.compile` can follow.

Source: GPipe (NeurIPS 2019) §2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError
from pipefit.stage.device import to_device

COUNTER = "num_batches_tracked"
_AVERAGES = ("running_mean", "running_var")
TRACKED = (*_AVERAGES, COUNTER)
"""The buffers that a batch norm changes in training."""


class Call(NamedTuple):
    """The statistics of one call of a batch norm.

    Attributes:
        mean: per channel.
        invstd: 1 / √(variance + eps) per channel, where the variance is the mean square distance from the mean.
        size: elements of each channel.
        share: weight of these statistics in the new average; None: by the module's `momentum`.
        eps: added to the variance.
        counted: the module's counter counts it.
    """

    mean: Tensor
    invstd: Tensor
    size: float
    share: float | None
    eps: float
    counted: bool = True


def share_of(module: _BatchNorm, ahead: int) -> float:
    """The weight of a call in the averages of a batch norm, by its `momentum`.

    Args:
        module: the batch norm.
        ahead: calls since the counter of the module was changed, with this one.
    """
    if module.momentum is not None:
        return module.momentum
    counter = module._buffers.get(COUNTER)
    if counter is None:
        return 0.0
    return 1.0 / (float(counter) + ahead)


class RunningAverages:
    """The running averages of a batch norm in a stage, which change once per update.

    `begin` and `restore` stand around a forward: torch.compile can follow a list that is empty at the start, but not a
    table that grows.

    Args:
        module: a batch norm that tracks running statistics.

    Attributes:
        has_own_forward: the module's forward is not torch's.
        is_replicated: its stage is one of several copies.
        num_channels: the length of each average.
        last: the last call of each number, whose settings hold for statistics that were added up elsewhere, too.
        placed: what is in the place of the buffers during a forward.

    Raises:
        ModelError: it is an `nn.SyncBatchNorm`.
    """

    def __init__(self, module: _BatchNorm) -> None:
        if isinstance(module, SyncBatchNorm):
            raise ModelError(
                "nn.SyncBatchNorm normalises by the samples of all processes, which in a pipeline hold other layers; "
                "use nn.BatchNorm2d, which normalises each micro-batch by its own statistics"
            )
        self.module = module
        self.has_own_forward = type(module).forward is not _BatchNorm.forward or "forward" in module.__dict__
        self.is_replicated = False
        self.num_channels: int = module._buffers["running_mean"].numel()  # type: ignore[union-attr]
        self._seen: dict[int, list[list[Call]]] = {}
        self._gathered: dict[int, Tensor] = {}
        self.last: dict[int, Call] = {}
        self._fresh: list[Call] = []
        self._real: dict[str, Any] = {}
        self.placed: dict[str, Any] = {}

    @property
    def is_tracking(self) -> bool:
        """Whether the module changes its averages in training now; its settings may change between two steps."""
        return self.module.track_running_stats and self.module.running_mean is not None

    def begin(self, mean: Tensor, var: Tensor) -> None:
        """Puts copies in the place of the buffers; see `copied`.

        Args:
            mean: copy of the running mean.
            var: copy of the running variance.
        """
        buffers = self.module._buffers
        self._fresh = []
        self._mean = mean
        self._var = var
        self._real = {name: buffers[name] for name in TRACKED if name in buffers}
        self.placed = dict(self._real)
        self.placed["running_mean"] = _Watched.of(self, "running_mean", mean)
        self.placed["running_var"] = _Watched.of(self, "running_var", var)
        counter = self._real.get(COUNTER)
        if self.has_own_forward and counter is not None:
            self.placed[COUNTER] = counter.clone()
        buffers.update(self.placed)
        self.module.__dict__["_averages"] = self

    def restore(self) -> dict[str, Any]:
        """Restores the buffers; returns those that the forward wrote itself, as it left them."""
        buffers = self.module._buffers
        written = {name: buffers[name] for name in self._real if self._is_changed(name, buffers[name])}
        buffers.update(self._real)
        del self.module.__dict__["_averages"]
        return written

    def count(self, update: int, written: Mapping[str, Any]) -> None:
        """Counts the statistics that the forward noted.

        Args:
            update: the update that they belong to; several are in flight without a flush.
            written: what `restore` gave.

        Raises:
            ModelError: the forward wrote averages that torch's batch norm changed too, or that copies would write.
        """
        if not self._fresh:
            # The module has a formula of its own, which counts each micro-batch.
            if written and self.is_replicated:
                raise ModelError(
                    f"{type(self.module).__name__} changes its running averages by a formula of its own, which each "
                    "copy of its stage would apply to its own samples: give the stage one copy (replicas), or let it "
                    "call torch's batch norm, whose statistics are added up"
                )
            for name, value in written.items():
                self._real[name].copy_(value)
            return
        if not written.keys() <= {COUNTER}:
            raise ModelError(
                f"{type(self.module).__name__} changes its running averages itself, and torch's batch norm does too, "
                "but in a pipeline that one changes them only after all micro-batches; change them in a module of "
                "their own, or after the optimizer's step"
            )
        calls = self._seen.setdefault(update, [])
        calls += [[] for _ in self._fresh[len(calls) :]]
        for number, call in enumerate(self._fresh):
            same = calls[number]
            same.append(call._replace(counted=call.counted or COUNTER in written))
            self.last[number] = same[-1]

    def _is_changed(self, name: str, value: Any) -> bool:
        """Returns whether the forward wrote a buffer; what torch's batch norm writes has no new version."""
        if value is None or value is self._real[name]:
            return value is not self.placed[name]
        return value is not self.placed[name] or value._version > 0

    def forward(self, x: Tensor) -> Tensor:
        """The module's forward in a shorter way, if it is torch's own."""
        module = self.module
        if not (module.training and self.is_tracking):
            return type(module).forward(module, x)
        module._check_input_dim(x)
        return self.normalise(x, module.weight, module.bias, None, module.eps)

    def normalise(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        share: float | None,
        eps: float,
        counted: bool = True,
    ) -> Tensor:
        """Normalises a micro-batch by its own statistics, and notes them.

        A channel of one value becomes its bias, since the value is its own mean. `F.batch_norm` refuses such a batch,
        but here the other micro-batches may be larger.

        Args:
            x: samples × channels × any.
            weight: factor of each channel.
            bias: summand of each channel.
            share: see `Call`.
            eps: added to the variance.
            counted: the module's counter counts it.
        """
        if eps <= 0:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)  # which says what is wrong
        if share is None:
            now = share_of(self.module, len(self._fresh) + 1)
        else:
            now = share
        if share is not None and self._is_cumulative(share):
            share = None  # without a flush, updates before this one may not have been counted yet
        normal, mean, invstd = torch.native_batch_norm(x, weight, bias, self._mean, self._var, True, now, eps)
        size = x.numel() / x.shape[1]
        self._fresh.append(Call(mean.detach(), invstd.detach(), size, share, eps, counted))
        return normal

    def _is_cumulative(self, share: float) -> bool:
        """Returns whether a share is that of an average over all batches, by the counter as the forward left it."""
        counter = self.module._buffers.get(COUNTER)
        if self.module.momentum is not None or counter is None:
            counted = 0.0
        else:
            counted = float(counter)
        return counted > 0 and share == 1.0 / counted

    def gathered(self, update: int) -> Tensor | None:
        """The sums of an update so far (4 × channels of all calls; see `sums_of`), which replicas add up."""
        if update in self._seen:
            sums = [sums_of([self], update, number) for number in range(self.num_calls(update))]
            self.replace(update, torch.cat(sums, 1))
        return self._gathered.get(update)

    def replace(self, update: int, sums: Tensor | None) -> None:
        """Replaces what is counted for an update by what `gathered` gave."""
        self.forget(update)
        if sums is not None:
            self._gathered[update] = sums

    def forget(self, update: int) -> None:
        """Drops the statistics of an update."""
        self._seen.pop(update, None)
        self._gathered.pop(update, None)

    def forget_all(self) -> None:
        """Drops the statistics of all updates."""
        self._seen.clear()
        self._gathered.clear()

    def num_calls(self, update: int) -> int:
        """The most calls of the module in a forward of an update."""
        gathered = self._gathered.get(update)
        if gathered is None:
            before = 0
        else:
            before = gathered.shape[1] // self.num_channels
        return max(before, len(self._seen.get(update, ())))

    def seen(self, update: int, number: int) -> list[Call]:
        """The calls with a number, from 0 in each forward, by the micro-batches of an update."""
        calls = self._seen.get(update, [])
        if number < len(calls):
            return calls[number]
        return []

    def sums(self, update: int, number: int) -> Tensor | None:
        """The part of one call in what `gathered` gave."""
        gathered = self._gathered.get(update)
        channels = self.num_channels
        if gathered is None:
            return None
        return gathered[:, number * channels : (number + 1) * channels]


def adopt(modules: Iterable[nn.Module]) -> list[RunningAverages]:
    """The running averages of the batch norms among some modules, which change only by `update_averages`."""
    norms = [module for module in dict.fromkeys(modules) if isinstance(module, _BatchNorm)]
    return [RunningAverages(norm) for norm in norms if norm.running_mean is not None]


@contextlib.contextmanager
def copied(norms: Sequence[RunningAverages], update: int | None) -> Iterator[None]:
    """The context of a forward, with copies in the place of running averages.

    Args:
        norms: of the stage; those that do not track are left out.
        update: the update that counts the forward; None: a replay.
    """
    norms = [norm for norm in norms if norm.is_tracking]
    tables: list[dict[str, Any]] = [norm.module._buffers for norm in norms]
    averages = [table[name] for table in tables for name in _AVERAGES]
    copies = torch._foreach_mul(averages, 1) if averages else []  # of all at once
    for norm, mean, var in zip(norms, copies[::2], copies[1::2], strict=True):
        norm.begin(mean, var)
    try:
        yield
    finally:
        written = [norm.restore() for norm in norms]
    if update is not None:
        for norm, own in zip(norms, written, strict=True):
            norm.count(update, own)


def normalised(
    module: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None, share: Any, eps: float
) -> Tensor:
    """The norm of a batch norm in training, as a function: `F.batch_norm` with its running averages and its counter.

    Args:
        module: holds the averages.
        x: samples × channels × any.
        weight: factor of each channel.
        bias: summand of each channel.
        share: weight of the statistics in the new averages; None: by the module's `momentum`.
        eps: added to the variance.
    """
    averages = module.__dict__.get("_averages")
    if averages is not None:
        return averages.normalise(x, weight, bias, share, eps)
    assert isinstance(module, _BatchNorm)
    counter = module.num_batches_tracked
    if counter is not None:
        counter.add_(1)
    if share is None:
        share = share_of(module, 0)
    return F.batch_norm(x, module.running_mean, module.running_var, weight, bias, True, share, eps)


class _Watched(Tensor):
    """The copy of a running average in a forward; torch's batch norm does not take it without being noted."""

    averages: RunningAverages
    buffer: str

    @staticmethod
    def of(averages: RunningAverages, buffer: str, copied: Tensor) -> _Watched:
        """A watched tensor over the memory of a copy; its version stays when compiled code changes the copy."""
        made = copied.data.as_subclass(_Watched)
        made.averages = averages
        made.buffer = buffer
        return made

    def now(self) -> _Watched:
        """The copy of the forward that runs: a replay of a graph is given those of the first run."""
        return self.averages.placed[self.buffer]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch, which gives plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            args, named = pytree.tree_map_only(_Watched, _Watched.now, (args, kwargs or {}))
            return _NORMS.get(func, func)(*args, **named)


def _functional(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` with copies of running averages."""
    if training and isinstance(running_mean, _Watched):
        return running_mean.averages.normalise(x, weight, bias, momentum, eps, counted=False)
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def _of_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """`torch.batch_norm` with copies of running averages."""
    return _functional(x, running_mean, running_var, weight, bias, training, momentum, eps)


_NORMS: dict[Any, Callable[..., Tensor]] = {F.batch_norm: _functional, torch.batch_norm: _of_torch}


def sums_of(norms: Sequence[RunningAverages], update: int, number: int) -> Tensor:
    """The sums of a call, for norms with as many micro-batches of an update: 4 × channels, which groups of samples add.

    Count, sum, sum of square distances from the group's mean, and count times the square of that mean. Sums of squares
    alone would lose the variance of values that are large and alike.
    """
    parts = [sums for norm in norms if (sums := norm.sums(update, number)) is not None]
    if parts:
        gathered = torch.cat(parts, 1)
    else:
        gathered = None
    # All micro-batches at once: one by one, this would cost as much as the forward of a small layer.
    micro_batches = list(zip(*(norm.seen(update, number) for norm in norms), strict=True))
    if not micro_batches:
        assert gathered is not None
        return gathered
    every = [call for calls in micro_batches for call in calls]
    mean = torch.cat([call.mean for call in every]).double().view(len(micro_batches), -1)
    invstd = torch.cat([call.invstd for call in every]).double().view(len(micro_batches), -1)
    variance = invstd.pow(-2).sub_(every[0].eps)
    counts = torch.tensor([[call.size for call in calls] for calls in micro_batches], dtype=torch.float64)
    if len(norms) > 1:
        counts = counts.repeat_interleave(torch.tensor([norm.num_channels for norm in norms]), 1)
    counts = to_device(counts, mean.device).expand_as(mean)
    count = counts.sum(0)
    total = mean.mul(counts).sum(0)
    centre = total / count
    distances = variance.add_((mean - centre).square_()).mul_(counts).sum(0)
    sums = torch.stack([count, total, distances, total * centre])
    if gathered is None:
        return sums
    return sums + gathered
