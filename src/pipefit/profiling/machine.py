"""The speed and size of one device of this machine: FLOP per second, bytes per second, memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from pipefit.profiling.clock import Clock, median_of
from pipefit.profiling.untouched import with_threads
from pipefit.spec.host import usable_bytes
from pipefit.spec.topology import Device
from pipefit.stage import accelerator
from pipefit.stage.device import random_state_kept

_COPIED_BYTES = 64 * 2**20
_KERNELS = 100
_USABLE = 0.95
_FREE_CORES = 0.5
"""Mean number of idle cores at which programs do not slow each other down."""


def measure_device(
    device: str | torch.device = "cpu",
    *,
    threads: int | None = 1,
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    repeats: int = 5,
) -> Device:
    """Measures a device by a large matrix product, a large copy and a tiny operation; takes well under a second.

    Args:
        device: to measure.
        threads: torch's threads meanwhile; None: unchanged.
        dtype: of the matrix product.
        ranks: number of ranks that share the memory of the machine (CPU) or of the device.
        repeats: of which the medians are taken.

    Returns:
        A device with `efficiency` 1, because its `flops` are measured and not those of a data sheet.
    """
    place = torch.device(device)
    if accelerator.is_accelerator(place):
        size = 8192
    else:
        size = 768
    with with_threads(threads), random_state_kept(place):
        matrix = torch.randn(size, size, device=place).to(dtype)
        source = torch.zeros(_COPIED_BYTES // 4, device=place)
        target = torch.empty_like(source)
        tiny = torch.zeros(1, device=place)
        clock = Clock(place)

        def many() -> None:
            for _ in range(_KERNELS):
                tiny.add_(1)

        turns = []
        for _ in range(repeats + 1):
            product_s = clock.seconds(lambda: torch.mm(matrix, matrix))
            copy_s = clock.seconds(lambda: target.copy_(source))
            turns.append((product_s, copy_s, clock.seconds(many)))
    product_s, copy_s, kernels_s = map(median_of, zip(*turns[1:], strict=True))
    return Device(
        memory_bytes=_memory_bytes(place) / ranks,
        flops=2 * size**3 / product_s,
        memory_bandwidth_bytes_per_s=2 * _COPIED_BYTES / copy_s,
        efficiency=1.0,
        kernel_s=kernels_s / _KERNELS,
    )


class CpuUse(NamedTuple):
    """Seconds of the machine's cores since it started, and of this process.

    Attributes:
        busy_s: of all cores, in any process.
        idle_s: of all cores.
        own_s: of this process.
        at_s: time of the reading.
    """

    busy_s: float
    idle_s: float
    own_s: float
    at_s: float

    @classmethod
    def now(cls) -> CpuUse | None:
        """The use of the machine until now; None: the system does not say."""
        try:
            with Path("/proc/stat").open(encoding="ascii") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        per_second = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        busy_s = (sum(ticks) - idle) / per_second
        return cls(busy_s, idle / per_second, time.process_time(), time.monotonic())


def cores_of_others(before: CpuUse, after: CpuUse, own_s: float) -> float:
    """Mean number of cores that other programs took, between two readings; 0 where a core was free for them.

    Args:
        before: the first reading.
        after: the second one.
        own_s: seconds of cores that the run itself took meanwhile, in all its processes.
    """
    busy = after.busy_s - before.busy_s
    idle = after.idle_s - before.idle_s
    wall = after.at_s - before.at_s
    if wall <= 0 or idle >= _FREE_CORES * wall:
        return 0.0
    return max(busy - own_s, 0.0) / wall


def _memory_bytes(device: torch.device) -> float:
    if accelerator.is_accelerator(device):
        # A part is lost between blocks of different sizes.
        return _USABLE * accelerator.free_bytes(device)
    return float(usable_bytes())
