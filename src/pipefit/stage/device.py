"""The device of a process: by the name that a user gave, or the GPU that belongs to the process."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import PipefitError


def process_device(name: Any = None) -> torch.device:
    """The device of this process; a GPU becomes the one that calls without a device use, instead of GPU 0.

    Args:
        name: as of `usable_device`; None: the process's GPU when there is one, else the CPU.

    Raises:
        PipefitError: there is no such device, or there are GPUs, but fewer than ranks on this machine.
    """
    if name is not None:
        device = usable_device(name)
    elif torch.cuda.is_available():
        device = torch.device("cuda", _own_index())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def usable_device(name: Any) -> torch.device:
    """The device of a name such as "cpu" or "cuda:0", or of a `torch.device`; "cuda" is the process's own GPU.

    Raises:
        PipefitError: there is no such device here, or it holds no numbers.
    """
    try:
        device = torch.device(name)
        if device == torch.device("cuda") and torch.cuda.is_available():
            device = torch.device("cuda", _own_index())
        torch.empty(1, device=device).zero_().item()
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise PipefitError(f"--device {name}: cannot be used here: {reason}") from None
    return device


def _own_index() -> int:
    """The GPU of this rank among those of the machine.

    Raises:
        PipefitError: there are fewer GPUs than ranks.
    """
    index = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.cuda.device_count()
    if index >= count:
        raise PipefitError(
            f"each rank needs a GPU of its own, but {os.environ.get('LOCAL_WORLD_SIZE', index + 1)} ranks were started "
            f"on this machine, where torch sees {count}; start {count}, or train on the CPU (device cpu)"
        )
    return index


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a GPU; one of the host is pinned first, so that the host need not wait for the copy."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def settle(device: torch.device) -> None:
    """Waits until a device has done all that it was given; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Lets the peak of a GPU's memory begin anew, after measurements; that of a process on the CPU cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> float:
    """Peak memory of this process: of tensors on its GPU where it trains there, else its resident set."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def workspace_bytes(device: torch.device) -> int:
    """Bytes that products of matrices take of a GPU for themselves, from the first one on, both ways."""
    if device.type != "cuda":
        return 0
    settle(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    torch.nn.functional.linear(weight, weight, weight[0]).sum().backward()
    del weight
    return torch.cuda.memory_allocated(device) - before
