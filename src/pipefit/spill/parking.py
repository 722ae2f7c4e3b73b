"""What waits on a tier within a step: activations at the cuts, from a stage's forward to its replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipefit.ir.spill import UNDER_WAY
from pipefit.spill.arena import aligned
from pipefit.spill.lanes import Copy
from pipefit.spill.tiers import Key, TierStore
from pipefit.stage.record_layout import Layout

__all__ = ["Parking"]


class _Parked(NamedTuple):
    """Tensors on the tier: how they lie in their record, and its version."""

    layout: Layout
    strides: list[tuple[int, ...] | None]
    version: int


class Parking:
    """Tensors on a tier, by the key of their record.

    How large a record must be is known once its tensors are there for the first time: then it gets its room, which it
    keeps until larger ones come.

    Args:
        tier: where they wait.
        device: where they come from, and back to.
    """

    def __init__(self, tier: TierStore, device: torch.device) -> None:
        self._tier, self._device = tier, device
        self._sizes: dict[Key, int] = {}
        self._there: dict[Key, _Parked] = {}
        self._count = 0
        self._under_way: deque[Copy] = deque()

    def leave(self, key: Key, tensors: Sequence[Tensor]) -> Copy:
        """Starts to write tensors; the caller need not keep them.

        Not more than `UNDER_WAY` copies of them are on the device at a time: this waits until the first of so many is
        written, so that a slow tier does not fill the device.

        Raises:
            TierError: there is no room for them.
        """
        layout = Layout(tensors)
        if layout.num_bytes > self._sizes.get(key, 0):
            self._tier.reserve_scratch({key: layout.num_bytes})
            self._sizes[key] = layout.num_bytes
        if len(self._under_way) == UNDER_WAY:
            self._under_way.popleft().wait()
        record = self._record(key)
        strides = [_stride(tensor) for tensor in tensors]
        for view, tensor in zip(_views(layout, strides, record), tensors, strict=True):
            view.copy_(tensor)
        self._count += 1
        self._there[key] = _Parked(layout, strides, self._count)
        copy = self._tier.write(key, self._count, record)
        self._under_way.append(copy)
        return copy

    def take(self, key: Key) -> tuple[Copy, Callable[[], list[Tensor]]]:
        """Starts to read tensors; the second gives them once the first has ended."""
        parked = self._there.pop(key)
        record = self._record(key)
        copy = self._tier.read(key, parked.version, record)
        return copy, lambda: _views(parked.layout, parked.strides, record)

    def _record(self, key: Key) -> Tensor:
        return aligned(self._sizes.get(key, 0), self._device)


def _stride(tensor: Tensor) -> tuple[int, ...] | None:
    """How a tensor without gaps lies in memory, for what computes with it may add up in that order; else None."""
    return tensor.stride() if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else None


def _views(layout: Layout, strides: Sequence[tuple[int, ...] | None], record: Tensor) -> list[Tensor]:
    views = layout.views(record)
    return [
        view if stride is None else view.as_strided(view.shape, stride)
        for view, stride in zip(views, strides, strict=True)
    ]
