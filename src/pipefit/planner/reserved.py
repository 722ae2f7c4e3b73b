"""Memory of a GPU that a process of torch takes, from the bytes of its tensors; each constant with its source."""

from __future__ import annotations

from pipefit.spec import Device

_LOST = 0.15
"""Share that is lost between the blocks of torch's allocator: GMLake (Guo et al., ASPLOS 2024) saves so much on average
with eight language models on A100s of 80 GB. Weights and states, allocated once, are assumed to lose nothing."""

_GROUP_BYTES = 688 * 2**20
"""Buffers of NCCL for a group of devices: measured on A100s with NVLink, for more than two (NVIDIA/nccl, issue 964)."""

_CONTEXT_BYTES = 300e6
"""CUDA's own data and kernels in a process of torch, from CUDA 11.7 on (pytorch/pytorch, issue 107667)."""

_VISIBLE = 79.15 * 2**30 / 80e9
"""CUDA reports 79.15 GiB of an A100 of "80 GB", in torch's messages when memory runs out."""


def reserved_bytes(standing_bytes: float, peak_bytes: float, num_groups: int) -> float:
    """Bytes that a process reserves.

    >>> round(reserved_bytes(10e9, 27e9, 0) / 1e9, 1)
    30.3

    Args:
        standing_bytes: of weights, gradients and optimizer states.
        peak_bytes: the most of all tensors at once.
        num_groups: groups of devices with which it exchanges: its copies, those that share its layers, its pipeline.
    """
    coming_bytes = peak_bytes - standing_bytes
    return standing_bytes + coming_bytes / (1 - _LOST) + num_groups * _GROUP_BYTES + _CONTEXT_BYTES


def visible_bytes(device: Device) -> float:
    """Bytes of a device's memory, whose data sheet counts 2³⁰ bytes as a GB, that CUDA gives to processes."""
    return _VISIBLE * device.memory_bytes
