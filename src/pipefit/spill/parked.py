"""Tensors that wait on a tier: activations and gradients at stage boundaries, and other tensors of a process."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.ir.spill import UNDER_WAY
from pipefit.spill.arena import aligned
from pipefit.spill.lanes import Copy
from pipefit.spill.tier_store import Sizes, TierStore
from pipefit.spill.tiers import Key
from pipefit.stage.record_layout import Field, Layout, name_of


class _Waiting(NamedTuple):
    """Tensors that wait: their layout in the record, and its version."""

    fields: list[Field]
    version: int


class ParkedTensors:
    """Tensors on a tier, by the key of their record.

    The size of a record is known once its tensors exist for the first time: then it gets its room, which it keeps until
    larger ones come.

    Args:
        tier: on which they wait.
        device: from which they come, and to which they return.
        is_scratch: whether commits leave them out (except on a tier that processes share).
    """

    def __init__(self, tier: TierStore, device: torch.device, is_scratch: bool = True) -> None:
        self._tier = tier
        self._device = device
        self._is_scratch = is_scratch
        self._sizes: Sizes = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._lent: dict[Key, tuple[_Waiting, list[weakref.ref[Tensor]]]] = {}
        self._count = 0
        self._under_way: deque[tuple[Copy, Tensor]] = deque()

    def write(self, key: Key, tensors: Sequence[Tensor]) -> Copy:
        """Starts to write tensors; the caller need not keep them. Tensors that `read` returned stay on the tier.

        At most `UNDER_WAY` copies of them are on the device at a time: what follows is ordered after the write of the
        first of them, so that a slow tier does not fill the device.

        Raises:
            TierError: there is no room for them.
        """
        waiting, lent = self._lent.pop(key, (None, []))
        if waiting and len(lent) == len(tensors) and all(r() is t for r, t in zip(lent, tensors, strict=True)):
            self._waiting[key] = waiting
            copy = Copy()
            copy.run(lambda: None, ())
            return copy
        # The strides are kept: operations may add up in memory order.
        layout = Layout(tensors, as_they_lie=True)
        if layout.num_bytes > self._sizes.get(key, -1):
            self._tier.reserve_more({key: layout.num_bytes}, self._is_scratch)
            self._sizes[key] = layout.num_bytes
        if len(self._under_way) == UNDER_WAY:
            self._let_go()
        record = aligned(self._sizes[key], self._device)
        for view, tensor in zip(layout.views(record), tensors, strict=True):
            view.copy_(tensor)
        self._count += 1
        self._waiting[key] = _Waiting(layout.fields, self._count)
        copy = self._tier.write(key, self._count, record)
        self._under_way.append((copy, record))
        return copy

    def _let_go(self) -> None:
        """Frees the first copy on the device: what gets its memory is ordered after the write from it."""
        copy, _ = self._under_way.popleft()
        copy.join()

    def end_pass(self) -> None:
        """Frees all copies on the device."""
        while self._under_way:
            self._let_go()

    def read(self, key: Key, keep: bool = False) -> tuple[Copy, Callable[[], list[Tensor]]]:
        """Starts to read tensors; the second value returns them once the first has ended.

        Args:
            key: of their record.
            keep: whether they will be read again without being written again.
        """
        if keep:
            waiting = self._waiting[key]
        else:
            waiting = self._waiting.pop(key)
        record = aligned(self._sizes[key], self._device)
        copy = self._tier.read(key, waiting.version, record)

        def tensors() -> list[Tensor]:
            views = [field.of(record) for field in waiting.fields]
            self._lent[key] = waiting, [weakref.ref(view) for view in views]
            return views

        return copy, tensors

    def describe(self) -> list[Any]:
        """JSON data from which `restore` finds all tensors again, in another process with the same tier."""
        rows = []
        for key, size in self._sizes.items():
            fields, version = self._waiting.get(key, ((), None))
            plain = [[start, list(shape), name_of(dtype), stride] for start, shape, dtype, stride in fields]
            rows.append([*key, size, version, plain])
        return rows

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """Restores the tensors from the result of `describe`, in place of those known here."""
        self._sizes.clear()
        self._waiting.clear()
        for stage, kind, mb, size, version, plain in rows:
            key = Key(stage, kind, mb)
            self._sizes[key] = size
            if version is not None:
                fields = [Field(start, torch.Size(s), getattr(torch, d), stride) for start, s, d, stride in plain]
                self._waiting[key] = _Waiting(fields, version)
                self._count = max(self._count, version)
