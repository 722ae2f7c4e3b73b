"""The most memory that one update needs on this rank, with many strategies alive in the same process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def rise_bytes(work: Callable[[], object]) -> float | None:
    """Bytes by which the memory in use rises while `work` runs; None where the system does not report it.

    On a CPU the kernel's high-water mark of the resident set is reset first, and what the allocator holds in reserve
    is given back, so that memory which earlier work left there counts again.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return float(torch.cuda.max_memory_allocated() - before)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")
        before = _status("VmRSS")
    except (OSError, AttributeError, KeyError):
        work()
        return None
    work()
    return max(_status("VmHWM") - before, 0.0)


def _status(field: str) -> float:
    """A field of the process's status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) * 1024
    raise KeyError(field)
