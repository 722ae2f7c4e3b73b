"""The device of a process: by the name that a user gave, or the GPU that belongs to the process."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch

from pipefit.errors import PipefitError


def default_device() -> torch.device:
    """The process's GPU when there is one, else the CPU.

    Raises:
        PipefitError: there are GPUs, but fewer than ranks on this machine.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", _own_index())
    return torch.device("cpu")


def usable_device(name: Any) -> torch.device:
    """The device of a name such as "cpu" or "cuda:0", or of a `torch.device`; "cuda" is the process's own GPU.

    Raises:
        PipefitError: there is no such device here, or it holds no numbers.
    """
    try:
        device = torch.device(name)
        is_any_gpu = device == torch.device("cuda") and torch.cuda.is_available()
        if is_any_gpu:
            device = torch.device("cuda", _own_index())
        torch.empty(1, device=device).zero_().item()
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as problem:
        raise PipefitError(f"--device {name}: cannot be used here: {str(problem).splitlines()[0]}") from None
    return device


def _own_index() -> int:
    """The GPU of this rank among those of the machine.

    Raises:
        PipefitError: there are fewer GPUs than ranks.
    """
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise PipefitError(
            f"each rank needs a GPU of its own, but {os.environ.get('LOCAL_WORLD_SIZE', index + 1)} ranks were started "
            f"on this machine, where torch sees {count}; start {count}, or train on the CPU (device cpu)"
        )
    return index


def make_current(device: torch.device) -> None:
    """Lets a GPU be the one that calls without a device use, in this thread: they would take memory of GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def settle(device: torch.device) -> None:
    """Waits until a device has done all that it was given; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Lets the peak of a GPU's memory begin anew; that of a process on the CPU cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> float:
    """Peak memory of this process: of tensors on its GPU where it trains there, else its resident set."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
