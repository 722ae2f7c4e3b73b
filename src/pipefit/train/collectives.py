"""How long the processes of a rank take to sum, measured where tensor parallelism will do it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipefit.parallel.region import Region

__all__ = ["all_reduce_law"]

_SMALL, _LARGE, _REPEATS = 1 << 10, 1 << 20, 25
_WORK = 512


def all_reduce_law(region: Region | None) -> Callable[[float], float]:
    """Seconds of an all-reduce of so many bytes, on the line through two sizes; all processes of the run must ask.

    All ranks measure at the same time, as they will run, and all get the first process's figures.
    """
    if region is None:
        return lambda size: 0.0
    medians = [_median_s(region, size) for size in (_SMALL, _LARGE)]
    told = torch.tensor(medians, dtype=torch.float64)
    dist.broadcast(told, 0)
    small_s, large_s = told.tolist()
    per_byte = max(large_s - small_s, 0.0) / (_LARGE - _SMALL)
    return lambda size: small_s + per_byte * max(size - _SMALL, 0)


def _median_s(region: Region, size: int) -> float:
    """Seconds that a sum adds to work around it: partners never come together, nor to warm caches."""
    tensor, work = torch.zeros(size // 4), torch.ones(_WORK, _WORK)
    both, alone = [], []
    dist.barrier()
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        work @ work
        worked = time.perf_counter()
        dist.all_reduce(tensor, group=region.group)
        both.append(time.perf_counter() - began)
        alone.append(worked - began)
    return max(statistics.median(both[2:]) - min(alone), 1e-6)
