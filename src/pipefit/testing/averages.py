"""Batch norm over micro-batches in plain torch, by the definition of GPipe.

    micro-batch    each norm runs as its author wrote it; afterwards its averages are set back
    update         each norm's averages change once, by `F.batch_norm` of all its inputs in the mini-batch together

A norm that is called several times in a forward changes them once for each call. A norm that does not call torch's
function has a formula of its own, and keeps what it wrote.

Source: GPipe (NeurIPS 2019) §2.1.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pipefit.testing.case import Tensors

_TRACKED = ("running_mean", "running_var", "num_batches_tracked")
_FUNCTIONAL = inspect.signature(F.batch_norm)
_OF_TORCH = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


class _Call(NamedTuple):
    """A call of torch's batch norm: its input (channels × values), and the weight of its statistics."""

    values: Tensor
    share: float


def tracking_norms(root: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms with running averages, by their paths."""
    norms = {path: module for path, module in root.named_modules() if isinstance(module, _BatchNorm)}
    return {path: norm for path, norm in norms.items() if norm._buffers.get("running_mean") is not None}


class MiniBatchAverages:
    """The running averages of a model's batch norms, which change once per update.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._norms = tracking_norms(root)
        self._calls: dict[nn.Module, list[list[_Call]]] = {}
        self._counters: dict[nn.Module, Tensor | None] = {}

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[TorchFunctionMode]:
        """The context of a micro-batch, forward and backward; gives the context of its forward.

        Averages are set back after the backward, which needs the tensors as the forward left them.
        """
        buffers = {norm: dict(norm._buffers) for norm in self._norms.values()}
        before = {norm: _copies(table) for norm, table in buffers.items()}
        notes = _Notes({id(table["running_mean"]): norm for norm, table in buffers.items()})
        yield notes
        for norm, calls in notes.calls.items():
            self._calls.setdefault(norm, []).append(calls)
            norm._buffers.update(buffers[norm])
            for name, value in before[norm].items():
                buffer = buffers[norm][name]
                assert buffer is not None
                buffer.copy_(value)
            self._counters[norm] = notes.counters[norm]

    def are_in(self, names: Collection[str]) -> bool:
        """Whether some of the averages are among buffers with these names."""
        return any(f"{path}.running_mean" in names for path in self._norms)

    @torch.no_grad()
    def update(self, names: Collection[str] | None = None) -> None:
        """Changes the averages by all micro-batches since the last update.

        Args:
            names: the names of buffers; only averages among them change. None: all.
        """
        for path, norm in self._norms.items():
            is_meant = names is None or f"{path}.running_mean" in names
            if norm not in self._calls or not is_meant:
                continue
            micro_batches = self._calls.pop(norm)
            for calls in zip_longest(*micro_batches):
                there = [call for call in calls if call is not None]
                together = torch.cat([call.values for call in there], 1).T
                F.batch_norm(together, norm.running_mean, norm.running_var, None, None, True, there[-1].share)
            counter = self._counters.pop(norm)
            if counter is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counter)


class _Notes(TorchFunctionMode):
    """The calls of batch norms while it is entered.

    Args:
        norms: the batch norms, by the id of their running mean.

    Attributes:
        calls: the calls of each norm.
        counters: the batches that each of them has counted, as it was when the mode was left.
    """

    def __init__(self, norms: Mapping[int, _BatchNorm]) -> None:
        super().__init__()
        self.calls: dict[_BatchNorm, list[_Call]] = {}
        self.counters: dict[nn.Module, Tensor | None] = {}
        self._norms = norms

    def __exit__(self, *raised: Any) -> None:
        """Notes the counters: the backward may replay calls of the user's checkpoints."""
        super().__exit__(*raised)
        for norm in self.calls:
            counter = norm.num_batches_tracked
            if counter is None:
                self.counters[norm] = None
            else:
                self.counters[norm] = counter.clone()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        named = kwargs or {}
        if func is F.batch_norm:
            bound = _FUNCTIONAL.bind(*args, **named)
            bound.apply_defaults()
            given = bound.arguments
        elif func is torch.batch_norm:
            given = dict(zip(_OF_TORCH, args, strict=False)) | dict(named)
        else:
            return func(*args, **named)
        norm = self._norms.get(id(given["running_mean"]))
        if not given["training"] or norm is None:
            return func(*args, **named)
        x = given["input"]
        share = given["momentum"]
        values = x.detach().transpose(0, 1).flatten(1).clone()
        self.calls.setdefault(norm, []).append(_Call(values, share))
        # `F.batch_norm` refuses one value per channel. A mini-batch must have more; a micro-batch may have one.
        return torch.batch_norm(
            x,
            given["weight"],
            given["bias"],
            given["running_mean"],
            given["running_var"],
            True,
            share,
            given["eps"],
            torch.backends.cudnn.enabled,
        )


def _copies(table: Mapping[str, Tensor | None]) -> Tensors:
    return {name: value.clone() for name, value in table.items() if value is not None and name in _TRACKED}
