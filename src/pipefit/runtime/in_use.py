"""Bytes in use on a device, as its allocator counts them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def in_use(device: torch.device) -> Callable[[], float] | None:
    """Tells, whenever it is called, how many bytes are in use; None where the system does not know.

    On a CPU it is all that C and C++ have allocated, in whatever thread: tensors, and what torch notes about them.
    """
    if device.type == "cuda":
        return lambda: float(torch.cuda.memory_allocated(device))
    return _of_glibc()


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _of_glibc() -> Callable[[], float] | None:
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    tell.restype = _Mallinfo

    def bytes_in_use() -> float:
        info = tell()
        return float(info.uordblks + info.hblkhd)

    return bytes_in_use
