"""The arena: a device's memory for records, allocated once and split into flat slots; parameters are views of them.

Nothing is allocated while training, so a cap on the device's memory can be guaranteed before it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipefit.spill.lanes import Copy
from pipefit.spill.tiers import ALIGNMENT
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.record_layout import Field, padded


def aligned(num_bytes: int, device: torch.device | None = None) -> Tensor:
    """A flat uint8 tensor whose first byte is at a multiple of `ALIGNMENT`, as direct I/O requires."""
    whole = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + num_bytes]


class Slot:
    """Memory for one record.

    Attributes:
        bytes: its memory.
        busy: copies that still read it; a new one into it waits for them.
        kept: the stage whose weights are still in it, and their version, until another record is loaded.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.busy: list[Copy] = []
        self.kept: tuple[object, int] | None = None

    def taken(self) -> tuple[Copy, ...]:
        """Returns and clears the copies that must end without an error before the slot is overwritten."""
        waits, self.busy = tuple(self.busy), []
        return waits


class Arena:
    """The slots of one device; several trials may use them one after another.

    Copy streams read and write slots that the caller's stream has allocated. Torch's allocator need not know this
    (`Tensor.record_stream`): no slot is returned to it before the lanes are closed, and a copy begins only after all
    work that was launched earlier on the caller's stream.

    Args:
        sizes: bytes of the largest record of each kind ("weights", "wgrad", "optim").
        counts: slots of each kind.
        device: where they are.
    """

    def __init__(self, sizes: dict[str, int], counts: dict[str, int], device: torch.device) -> None:
        self.device = device
        wanted = [(kind, padded(sizes.get(kind, 0))) for kind, count in counts.items() for _ in range(count)]
        num_bytes = [size for _, size in wanted]
        self._memory = aligned(sum(num_bytes), device)
        self._slots: dict[str, list[Slot]] = {}
        for (kind, _), room in zip(wanted, self._memory.split(num_bytes), strict=True):
            self._slots.setdefault(kind, []).append(Slot(room))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, including the alignment of the first."""
        return self._memory.untyped_storage().nbytes()

    def slot(self, kind: str, index: int) -> Slot:
        """A slot by its number."""
        return self._slots[kind][index]


class _Copied(NamedTuple):
    """A tensor that lies in the half copy of a weight."""

    weight: Tensor
    field: Field


def save_places(record: Callable[[], Tensor], halves: HalfCopies) -> saved_tensors_hooks:
    """While it is entered, autograd saves places in a record of weights instead of views of it.

    A saved view of the weights would be a view of the slot, which may hold another stage at the time of the backward.
    So the backward makes a new view in the slot in which the weights are then. Half copies leave with the weights, and
    the backward makes them again.

    Args:
        record: gives the bytes of the slot in which the weights are at that moment.
        halves: the half copies of these weights.
    """

    def pack(tensor: Tensor) -> Tensor | Field | _Copied:
        if tensor.layout is not torch.strided:
            return tensor
        weight = halves.weight_of(tensor)
        if weight is not None:
            start = int(tensor.storage_offset()) * tensor.itemsize
            return _Copied(weight, Field(start, tensor.shape, tensor.dtype, tensor.stride()))
        here = record()
        start = tensor.data_ptr() - here.data_ptr()
        if tensor.device != here.device or not 0 <= start < here.numel():
            return tensor
        return Field(start, tensor.shape, tensor.dtype, tensor.stride())

    def unpack(saved: Tensor | Field | _Copied) -> Tensor:
        if isinstance(saved, _Copied):
            copy = halves.of(saved.weight).detach()
            return saved.field.of(copy.view(torch.uint8).flatten())
        if isinstance(saved, Field):
            return saved.of(record())
        return saved

    return saved_tensors_hooks(pack, unpack)
