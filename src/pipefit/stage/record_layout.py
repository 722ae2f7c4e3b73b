"""Places of tensors in a record."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_GRAIN = 64


def padded(num_bytes: int, to: int = 4096) -> int:
    """The next multiple."""
    return -(-num_bytes // to) * to


class Field(NamedTuple):
    """One tensor of a record: its place in bytes, shape and type, and its strides where it is not contiguous."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, record: Tensor) -> Tensor:
        """The tensor, as a view of a record's bytes."""
        if self.stride is not None:
            typed = record[self.start :].view(self.dtype)
            return typed.as_strided(self.shape, self.stride, typed.storage_offset())
        return record[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


class Layout:
    """The tensors of a record, one after the other.

    Args:
        tensors: of the record.
        as_they_lie: whether they keep their strides, where they have no gaps; else they are contiguous.

    Attributes:
        fields: in the order given.
        num_bytes: of the record, padded.
    """

    def __init__(self, tensors: Iterable[Tensor], as_they_lie: bool = False) -> None:
        self.fields: list[Field] = []
        position = 0
        for tensor in tensors:
            if as_they_lie and is_dense(tensor):
                stride = tensor.stride()
            else:
                stride = None
            field = Field(position, tensor.shape, tensor.dtype, stride)
            self.fields.append(field)
            position += padded(field.num_bytes, _GRAIN)
        self.num_bytes = padded(position)

    @classmethod
    def of(cls, fields: Iterable[Field], num_bytes: int) -> Layout:
        """A layout of tensors with given places."""
        made = cls(())
        made.fields, made.num_bytes = list(fields), padded(num_bytes)
        return made

    def views(self, record: Tensor) -> list[Tensor]:
        """All tensors, as views of a record's bytes."""
        return [field.of(record) for field in self.fields]


def name_of(dtype: torch.dtype) -> str:
    """The name of a type without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, on the host, contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        return flat.view(torch.uint8).numpy().data
    return memoryview(b"")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of dense tensors; shared memory counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def is_dense(tensor: Tensor) -> bool:
    """Returns whether it has neither gaps nor overlaps in memory, in any order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def laid_out_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors inside a record."""
    return sum(padded(tensor.nbytes, _GRAIN) for tensor in tensors)


def nan_of(dtype: torch.dtype) -> float:
    """Not a number; 0 of a type that has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0


def absent(like: Field | Tensor, device: torch.device) -> Tensor:
    """A stand-in for a tensor that is elsewhere: its shape and type, without memory; reading it gives NaN."""
    return torch.full((), nan_of(like.dtype), dtype=like.dtype, device=device).expand(like.shape)


def is_absent(tensor: Tensor) -> bool:
    """Returns whether a tensor is a stand-in made by `absent`; one of integers, or of a single number, is not known."""
    if tensor.numel() < 2 or any(tensor.stride()) or tensor.is_meta:
        return False
    return bool(tensor[(0,) * tensor.dim()].isnan())
