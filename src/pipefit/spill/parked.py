"""Tensors that wait on a tier: activations and gradients at stage boundaries, or what else one process leaves."""

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
from pipefit.spill.tiers import Key, TierStore
from pipefit.stage.record_layout import Layout, is_dense


class _Form(NamedTuple):
    """How some tensors lie in their record: shape, type and strides of each; no strides where it has gaps."""

    shapes: list[list[int]]
    dtypes: list[str]
    strides: list[list[int] | None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Form:
        return cls(
            [list(tensor.shape) for tensor in tensors],
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            # What computes with a tensor may add up in the order in which it lies.
            [list(tensor.stride()) if is_dense(tensor) else None for tensor in tensors],
        )

    def layout(self) -> Layout:
        return Layout(
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def views(self, record: Tensor) -> list[Tensor]:
        return [
            view if stride is None else view.as_strided(view.shape, stride)
            for view, stride in zip(self.layout().views(record), self.strides, strict=True)
        ]


class ParkedTensors:
    """Tensors on a tier, by the key of their record.

    How large a record must be is known once its tensors are there for the first time: then it gets its room, which it
    keeps until larger ones come.

    Args:
        tier: where they wait.
        device: where they come from, and return to.
    """

    def __init__(self, tier: TierStore, device: torch.device) -> None:
        self._tier, self._device = tier, device
        self._sizes: dict[Key, int] = {}
        self._forms: dict[Key, tuple[_Form, int]] = {}
        self._lent: dict[Key, tuple[tuple[_Form, int], list[weakref.ref[Tensor]]]] = {}
        self._count = 0
        self._under_way: deque[Copy] = deque()

    def write(self, key: Key, tensors: Sequence[Tensor]) -> Copy:
        """Starts to write tensors; the caller need not keep them. What `read` gave is on the tier still.

        At most `UNDER_WAY` copies of them are on the device at a time: this waits until the first of so many is
        written, so that a slow tier does not fill the device.

        Raises:
            TierError: there is no room for them.
        """
        form_lent, lent = self._lent.pop(key, (None, []))
        if form_lent and len(lent) == len(tensors) and all(r() is t for r, t in zip(lent, tensors, strict=True)):
            self._forms[key] = form_lent
            copy = Copy(0)
            copy.run(lambda: None, ())
            return copy
        form = _Form.of(tensors)
        num_bytes = form.layout().num_bytes
        if num_bytes > self._sizes.get(key, -1):
            self._tier.reserve_scratch({key: num_bytes})
            self._sizes[key] = num_bytes
        if len(self._under_way) == UNDER_WAY:
            self._under_way.popleft().wait()
        record = aligned(self._sizes[key], self._device)
        for view, tensor in zip(form.views(record), tensors, strict=True):
            view.copy_(tensor)
        self._count += 1
        self._forms[key] = form, self._count
        copy = self._tier.write(key, self._count, record)
        self._under_way.append(copy)
        return copy

    def read(self, key: Key, keep: bool = False) -> tuple[Copy, Callable[[], list[Tensor]]]:
        """Starts to read tensors; the second value gives them once the first has ended.

        Args:
            key: of their record.
            keep: whether they will be read again, though they are not written again.
        """
        form, version = self._forms[key] if keep else self._forms.pop(key)
        record = aligned(self._sizes[key], self._device)
        copy = self._tier.read(key, version, record)

        def tensors() -> list[Tensor]:
            views = form.views(record)
            self._lent[key] = (form, version), [weakref.ref(view) for view in views]
            return views

        return copy, tensors

    def describe(self) -> list[Any]:
        """JSON data from which `restore` finds all tensors again, in another process with the same tier."""
        rows: list[Any] = []
        for key, size in self._sizes.items():
            form, version = self._forms.get(key, ((), None))
            rows.append([*key, size, *(() if version is None else (version, *form))])
        return rows

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """Takes up the tensors that `describe` was called for, in place of those known here."""
        self._sizes.clear()
        self._forms.clear()
        for stage, kind, mb, size, *rest in rows:
            key = Key(stage, kind, mb)
            self._sizes[key] = size
            if rest:
                version, *form = rest
                self._forms[key] = _Form(*form), version
                self._count = max(self._count, version)
