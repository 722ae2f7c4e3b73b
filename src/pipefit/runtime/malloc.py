"""The allocator of glibc: bytes in use, and the treatment of freed memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

from pipefit.stage import accelerator

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
_LARGEST_THRESHOLD = 32 << 20
_OWN_MAPPING_BYTES = 1 << 20


def keep_freed() -> None:
    """Keeps freed memory in the process, for the next step.

    Otherwise glibc returns free memory at the end of its heap, and a step that keeps many activations gets it back from
    the system page by page: 4 to 9 % of the steps of a small convolutional network.
    """
    _set(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    _set(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed() -> None:
    """Returns freed memory to the system at once: otherwise glibc keeps up to 32 MiB of every size it saw."""
    _set(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def trim() -> None:
    """Returns free memory to the system, once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)


def in_use(device: torch.device) -> Callable[[], float] | None:
    """A function that returns the bytes in use; None where the system does not report them.

    On a CPU these are all allocations of C and C++, of all threads: tensors, and torch's data about them.
    """
    if accelerator.is_accelerator(device):
        return lambda: float(torch.accelerator.memory_allocated(device))
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
