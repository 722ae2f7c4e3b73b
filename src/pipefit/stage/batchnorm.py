"""Batch norm over micro-batches: each is normalised by its own statistics; running averages use the mini-batch.

The module's own forward runs, whatever it is. While it runs, stand-ins are in the place of its running averages:

    F.batch_norm(x, stand-in, …)     normalises, and notes the statistics of x for the update; nothing is written
    other code that reads one        gets what torch would have there now
    update                           the averages take the statistics of all micro-batches at once, call by call

A forward that is torch's own has a shorter way to the same, which `torch.compile` can follow.

Source: GPipe (NeurIPS 2019) §2.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError

_COUNTER = "num_batches_tracked"
_AVERAGES = ("running_mean", "running_var")
TRACKED = (*_AVERAGES, _COUNTER)
"""The buffers that a batch norm changes in training."""


class Call(NamedTuple):
    """The statistics of one call of a batch norm.

    Attributes:
        mean: per channel.
        invstd: 1 / √(variance + eps) per channel, where the variance is the mean square distance from the mean.
        count: elements of each channel.
        share: weight of these statistics in the new average; None: by the module's `momentum`.
        eps: added to the variance.
        counted: the module's counter counts it.
    """

    mean: Tensor
    invstd: Tensor
    count: float
    share: float | None
    eps: float
    counted: bool = True


class RunningAverages:
    """The running averages of a batch norm in a stage, which change once per update.

    `begin` and `end` stand around a forward: torch.compile can follow a list that is empty at the start, but not a
    table that grows.

    Args:
        module: a batch norm that tracks running statistics.

    Attributes:
        has_own_forward: the module's forward is not torch's.
        num_channels: the length of each average.

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
        self.num_channels: int = module._buffers["running_mean"].numel()  # type: ignore[union-attr]
        self._seen: dict[int, list[list[Call]]] = {}
        self._gathered: dict[int, Tensor] = {}
        self._fresh: list[Call] | None = None
        self._num_applied = 0
        self._real: dict[str, Any] = {}
        self._stand_ins: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        module.__dict__["_averages"] = self
        if not self.has_own_forward:
            module.__class__ = _deferring_class(type(module))

    def __getstate__(self) -> dict[str, Any]:
        """The state without stand-ins, which are for these very averages."""
        return self.__dict__ | {"_real": {}, "_stand_ins": {}, "_values": {}}

    def release(self) -> None:
        """Restores the module's own class."""
        del self.module.__dict__["_averages"]
        if not self.has_own_forward:
            self.module.__class__ = type(self.module).__bases__[1]

    def begin(self, is_replay: bool = False) -> None:
        """Puts stand-ins in the place of the averages.

        Args:
            is_replay: nothing that the forward writes is kept.
        """
        buffers: dict[str, Any] = self.module._buffers
        self._fresh, self._num_applied = [], 0
        if self._real.get("running_mean") is not buffers["running_mean"]:
            self._real = {name: buffers[name] for name in _AVERAGES}
            self._stand_ins = {name: _StandIn.of(self, name) for name in _AVERAGES}
        self._values = {name: self._real[name].clone() if is_replay else self._real[name] for name in _AVERAGES}
        if self.has_own_forward:
            self._real[_COUNTER] = buffers[_COUNTER]
            buffers[_COUNTER] = None if buffers[_COUNTER] is None else buffers[_COUNTER].clone()
        buffers.update(self._stand_ins)

    def end(self, update: int | None) -> None:
        """Restores the averages, and counts the statistics that were noted.

        Args:
            update: the update that they belong to; several are in flight without a flush. None: it was a replay.

        Raises:
            ModelError: the forward replaced averages after torch's batch norm had changed them.
        """
        buffers: dict[str, Any] = self.module._buffers
        fresh, self._fresh = self._fresh or [], None
        replaced = {name: buffers[name] for name in self._real if buffers[name] is not self._stand_ins.get(name)}
        buffers.update(self._real)
        if update is None:
            return
        if fresh and not replaced.keys() <= {_COUNTER}:
            raise self.written()
        if not fresh:
            # The module has a formula of its own, which counts each micro-batch.
            for name, value in replaced.items():
                if value is not None:
                    self._real[name].copy_(value)
            return
        if _COUNTER in replaced and replaced[_COUNTER]._version:
            fresh = [call._replace(counted=True) for call in fresh]
        calls = self._seen.setdefault(update, [])
        calls += [[] for _ in fresh[len(calls) :]]
        for same, call in zip(calls, fresh, strict=False):
            same.append(call)

    def written(self) -> ModelError:
        """The error of code that changes averages which torch's batch norm has changed in the same forward."""
        kind = type(self.module).__name__
        return ModelError(
            f"{kind} changes its running averages after torch's batch norm has, but in a pipeline that one changes "
            "them only after all micro-batches; change them in a module of their own, or after the optimizer's step"
        )

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
        count = x.numel() / x.shape[1]
        if eps <= 0:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)  # which says what is wrong
        normal, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        if self._fresh is not None:
            self._fresh.append(Call(mean.detach(), invstd.detach(), count, share, eps, counted))
        return normal

    @property
    def is_noted(self) -> bool:
        """Whether this forward has called torch's batch norm."""
        return bool(self._fresh)

    @torch.no_grad()
    def value(self, name: str) -> Tensor:
        """An average as torch would have it now: that of the last update, with the calls of this forward."""
        fresh = self._fresh or []
        if fresh and not self._num_applied:
            self._values = {name: value.clone() for name, value in self._values.items()}
        for number, call in enumerate(fresh[self._num_applied :], self._num_applied):
            share = self.share(number + 1) if call.share is None else call.share
            variance = (call.invstd.pow(-2) - call.eps) * (call.count / max(call.count - 1, 1))
            for one, new in (("running_mean", call.mean), ("running_var", variance)):
                self._values[one].lerp_(new.to(self._values[one].dtype), share)
        self._num_applied = len(fresh)
        return self._values[name]

    def share(self, ahead: int) -> float:
        """The weight of a call in the averages, by the module's `momentum`.

        Args:
            ahead: calls since the counter of the module was changed, with this one.
        """
        if self.module.momentum is not None:
            return self.module.momentum
        counter = self.module.num_batches_tracked
        return 0.0 if counter is None else 1.0 / (float(counter) + ahead)

    def gathered(self, update: int) -> Tensor | None:
        """Count, sum and sum of squares (3 × channels of all calls) of an update so far, which replicas add up."""
        if update in self._seen:
            sums = [_sums([self], update, number) for number in range(self.num_calls(update))]
            self.restore(update, torch.cat(sums, 1))
        return self._gathered.get(update)

    def restore(self, update: int, sums: Tensor | None) -> None:
        """Replaces what is counted for an update by what `gathered` gave."""
        self.forget(update)
        if sums is not None:
            self._gathered[update] = sums

    def forget(self, update: int) -> None:
        """Drops the statistics of an update."""
        self._seen.pop(update, None)
        self._gathered.pop(update, None)

    def num_calls(self, update: int) -> int:
        """The most calls of the module in a forward of an update."""
        gathered = self._gathered.get(update)
        before = 0 if gathered is None else gathered.shape[1] // self.num_channels
        return max(before, len(self._seen.get(update, ())))

    def seen(self, update: int, number: int) -> list[Call]:
        """The calls with a number, from 0 in each forward, by the micro-batches of an update."""
        return next(iter(self._seen.get(update, [])[number : number + 1]), [])

    def sums(self, update: int, number: int) -> Tensor | None:
        """The part of one call in what `gathered` gave."""
        gathered, channels = self._gathered.get(update), self.num_channels
        return None if gathered is None else gathered[:, number * channels : (number + 1) * channels]


def adopt(modules: Iterable[nn.Module]) -> list[RunningAverages]:
    """The running averages of the batch norms among some modules, from now on changed only by `commit`."""
    found = []
    for module in dict.fromkeys(modules):
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None:
            found.append(averages_of(module) or RunningAverages(module))
    return found


def averages_of(module: nn.Module) -> RunningAverages | None:
    """The running averages of a batch norm of a stage; None: it is something else, or in no stage."""
    found: RunningAverages | None = module.__dict__.get("_averages")
    return found


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
    averages = averages_of(module)
    if averages is not None:
        return averages.normalise(x, weight, bias, share, eps)
    assert isinstance(module, _BatchNorm)
    counter = module.num_batches_tracked
    if counter is not None:
        counter.add_(1)
    share = module.momentum if share is None else share
    if share is None:
        share = 0.0 if counter is None else 1.0 / float(counter)
    return F.batch_norm(x, module.running_mean, module.running_var, weight, bias, True, share, eps)


class _StandIn(Tensor):
    """A running average in a forward."""

    _averages: RunningAverages
    _name: str

    @staticmethod
    def of(averages: RunningAverages, name: str) -> _StandIn:
        """The stand-in of an average."""
        made = averages._real[name].as_subclass(_StandIn)
        made._averages, made._name = averages, name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch with the values of stand-ins; of a batch norm the statistics are noted."""
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS:
                return _NORMS[func](*args, **named)
            stand_ins = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, cls)]
            before = [_value(leaf)._version for leaf in stand_ins]
            args, named = pytree.tree_map(_value, (args, named))
            result = func(*args, **named)
            for leaf, version in zip(stand_ins, before, strict=True):
                if leaf._averages.is_noted and _value(leaf)._version != version:
                    raise leaf._averages.written()
            return result


def _value(leaf: Any) -> Any:
    return leaf._averages.value(leaf._name) if isinstance(leaf, _StandIn) else leaf


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
    """`F.batch_norm` with stand-ins."""
    if training and isinstance(running_mean, _StandIn):
        return running_mean._averages.normalise(x, weight, bias, momentum, eps, counted=False)
    mean, var, weight, bias = (_value(one) for one in (running_mean, running_var, weight, bias))
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


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
    """`torch.batch_norm` with stand-ins."""
    return _functional(x, running_mean, running_var, weight, bias, training, momentum, eps)


_NORMS: dict[Any, Callable[..., Tensor]] = {F.batch_norm: _functional, torch.batch_norm: _of_torch}


class _Deferring(_BatchNorm):
    """A batch norm whose forward is torch's own, with the shorter way."""

    _averages: RunningAverages

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the micro-batch's own statistics in training, by the running averages otherwise."""
        if not self.training or not self.track_running_stats:
            return super().forward(input)
        self._check_input_dim(input)
        return self._averages.normalise(input, self.weight, self.bias, None, self.eps)


@functools.cache
def _deferring_class(own: type) -> type:
    return type(f"Deferring{own.__name__}", (_Deferring, own), {})


@torch.no_grad()
def commit(norms: Sequence[RunningAverages], update: int) -> None:
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
            _update(group, _sums(group, update, number), share)
            _count(norm for norm in group if all(call.counted for call in norm.seen(update, number)[-1:]))
    for norm in norms:
        norm.forget(update)


def _kind(norm: RunningAverages, update: int, number: int) -> tuple[object, ...]:
    """What a norm has in common with those that are updated together: first its share."""
    seen, mean = norm.seen(update, number), norm.module._buffers["running_mean"]
    assert mean is not None
    share, eps = (seen[-1].share, seen[-1].eps) if seen else (None, norm.module.eps)
    share = float(norm.share(1) if share is None else share)
    return share, eps, mean.dtype, mean.device, len(seen), norm.sums(update, number) is not None


def _update(norms: Sequence[RunningAverages], sums: Tensor, share: float) -> None:
    """Moves the averages of norms to the statistics in sums, which `_sums` gave, by a share."""
    count, total, squares = sums
    mean = total / count
    variance = (squares - total * mean) / (count - 1).clamp(min=1)
    sizes = [norm.num_channels for norm in norms]
    for name, values in (("running_mean", mean), ("running_var", variance)):
        buffers: list[Any] = [norm.module._buffers[name] for norm in norms]
        torch._foreach_lerp_(buffers, list(values.to(buffers[0].dtype).split(sizes)), share)


def _count(norms: Iterable[RunningAverages]) -> None:
    """Adds one to the counters of batch norms that have one."""
    counters = [counter for norm in norms if (counter := norm.module._buffers[_COUNTER]) is not None]
    if counters:
        torch._foreach_add_(counters, 1)


def forget(norms: Sequence[RunningAverages], update: int) -> None:
    """Drops the statistics of an update that is not made."""
    for norm in norms:
        norm.forget(update)


def _sums(norms: Sequence[RunningAverages], update: int, number: int) -> Tensor:
    """Count, sum and sum of squares (3 × channels) of a call, for norms with as many micro-batches of an update."""
    parts = [sums for norm in norms if (sums := norm.sums(update, number)) is not None]
    gathered = torch.cat(parts, 1) if parts else None
    # All micro-batches at once: one by one, this would cost as much as the forward of a small layer.
    micro_batches = list(zip(*(norm.seen(update, number) for norm in norms), strict=True))
    if not micro_batches:
        assert gathered is not None
        return gathered
    every = [call for calls in micro_batches for call in calls]
    mean = torch.cat([call.mean for call in every]).double().view(len(micro_batches), -1)
    invstd = torch.cat([call.invstd for call in every]).double().view(len(micro_batches), -1)
    squares = invstd.pow(-2).sub_(every[0].eps).addcmul_(mean, mean)
    counts = torch.tensor([[call.count for call in calls] for calls in micro_batches], dtype=torch.float64)
    if len(norms) > 1:
        counts = counts.repeat_interleave(torch.tensor([norm.num_channels for norm in norms]), 1)
    sums = torch.stack([torch.ones_like(mean), mean, squares], 1).mul_(counts.to(mean.device).unsqueeze(1)).sum(0)
    return sums if gathered is None else sums + gathered
