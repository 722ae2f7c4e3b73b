"""The device of a process: by the name that a user gave, or the GPU that belongs to the process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import PipefitError
from pipefit.stage import accelerator

first_local_rank: int | None = None
"""The number of this process on its machine at its start, where it has got another one since: its GPU stays."""


def process_device(name: Any = None) -> torch.device:
    """The device of this process; a GPU becomes the one that calls without a device use, instead of GPU 0.

    Args:
        name: as of `usable_device`; None: the process's GPU when there is one that can train, else the CPU.

    Raises:
        PipefitError: there is no such device, or it cannot train, or there are GPUs, but fewer than ranks on this
            machine.
    """
    if name is not None:
        device = usable_device(name)
    else:
        device = _own(torch.device(accelerator.default_kind()))
    if accelerator.is_accelerator(device):
        accelerator.make_current(device)
        try:
            torch.zeros(1, dtype=torch.float64, device=device)
        except (RuntimeError, TypeError):
            raise PipefitError(
                f"--device {device}: cannot train: it has no float64, in which losses and gradient norms are added up; "
                "train on the CPU (device cpu)"
            ) from None
    return device


def usable_device(name: Any) -> torch.device:
    """The device of a name such as "cpu" or "cuda:0", or of a `torch.device`; "cuda" is the process's own GPU.

    Raises:
        PipefitError: there is no such device here, or it holds no numbers.
    """
    try:
        device = _own(torch.device(name))
        torch.empty(1, device=device).zero_().item()
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise PipefitError(f"--device {name}: cannot be used here: {reason}") from None
    return device


def _own(device: torch.device) -> torch.device:
    """The device; an accelerator without a number becomes that of this rank among those of the machine.

    Raises:
        PipefitError: there are fewer accelerators than ranks.
    """
    if device.type != accelerator.kind() or device != torch.device(device.type):
        return device
    index = first_local_rank
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.accelerator.device_count()
    if index >= count:
        raise PipefitError(
            f"each rank needs a GPU of its own, but {os.environ.get('LOCAL_WORLD_SIZE', index + 1)} ranks were started "
            f"on this machine, where torch sees {count}; start {count}, or train on the CPU (device cpu)"
        )
    return torch.device(device.type, index)


@contextmanager
def random_state_kept(device: torch.device = accelerator.CPU) -> Iterator[None]:
    """Restores every generator afterwards: Python's, numpy's, torch's on the CPU and `device`."""
    python = random.getstate()
    numpy = np.random.get_state()
    if accelerator.is_accelerator(device):
        devices = [device]
    else:
        devices = []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a GPU; one of the host is pinned first, so that the host need not wait for the copy."""
    if tensor.device.type == "cpu" and accelerator.is_accelerator(device):
        return accelerator.copied(accelerator.pinned_copy(tensor, device), device)
    return tensor.to(device, non_blocking=True)


def in_pinned_memory(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are pinned once, where a GPU will copy its micro-batches; elsewhere the batch itself."""
    if not accelerator.is_accelerator(device):
        return batch
    pinned = {}

    def pin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return leaf
        # A dict of tensors is both input and target.
        if id(leaf) not in pinned:
            pinned[id(leaf)] = accelerator.pinned_copy(leaf, device)
        return pinned[id(leaf)]

    return pytree.tree_map(pin, batch)
