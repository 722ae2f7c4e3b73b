"""The tensors that autograd saves of a stage whose weights may leave their slot before its backward.

A saved tensor that is a view of the weights would be a view of the slot, which holds another stage by then. So its
place in the record is saved instead, and the view is made anew where the weights are when the backward asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Place(NamedTuple):
    """A tensor inside a record of weights: where it starts, in bytes, and how it lies from there."""

    start: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, record: Tensor) -> Tensor:
        typed = record.view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + self.start // self.dtype.itemsize)


def save_places(record: Callable[[], Tensor]) -> saved_tensors_hooks:
    """While it is entered, autograd saves places in a record of weights instead of views of it.

    Args:
        record: gives the bytes of the slot in which the weights are at that moment.
    """

    def pack(tensor: Tensor) -> Tensor | _Place:
        if tensor.layout is not torch.strided:
            return tensor
        here = record()
        start = tensor.data_ptr() - here.data_ptr()
        if tensor.device != here.device or not 0 <= start < here.numel():
            return tensor
        return _Place(start, tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(saved: Tensor | _Place) -> Tensor:
        return saved.of(record()) if isinstance(saved, _Place) else saved

    return saved_tensors_hooks(pack, unpack)
