"""What a tier reaches: bytes per second to and from the host's memory or a disk."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import torch

from pipefit.memory.arena import aligned
from pipefit.memory.disk import DiskTier
from pipefit.memory.host import HostTier
from pipefit.memory.lanes import Lanes
from pipefit.memory.tiers import Key, TierStore
from pipefit.spec.topology import Tier

__all__ = ["measure_tier"]

_BYTES = 64 << 20
_REPEATS = 4


def measure_tier(
    folder: str | Path | None = None,
    device: str | torch.device = "cpu",
    *,
    capacity_bytes: float | None = None,
    num_bytes: int = _BYTES,
    repeats: int = _REPEATS,
) -> Tier:
    """Measures the host's memory, or the disk of a folder, with the copies that spilling uses.

    Args:
        folder: on the disk; None: the host's memory.
        device: at the other end of the copies.
        capacity_bytes: that it may take; None: what is free.
        num_bytes: of the record that is copied.
        repeats: of which the fastest counts; the first is a rehearsal.

    Raises:
        TierError: the folder cannot be used, or has no room.
    """
    place = torch.device(device)
    lanes = Lanes(place)
    name = f"probe-{os.getpid()}"
    tier: TierStore = HostTier(None, lanes, place) if folder is None else DiskTier(folder, name, lanes, device=place)
    key, slot = Key(0, "weights"), aligned(num_bytes, place)
    slot.fill_(1)
    written, read = [], []
    try:
        tier.reserve({key: num_bytes})
        for version in range(repeats):
            began = time.perf_counter()
            tier.write(key, version, slot).wait()
            written.append(time.perf_counter() - began)
            began = time.perf_counter()
            tier.read(key, version, slot).wait()
            read.append(time.perf_counter() - began)
    finally:
        tier.close()
        lanes.close()
        for file in Path(folder or os.devnull).glob(f"{name}.*"):
            file.unlink()
    if capacity_bytes is None:
        capacity_bytes = math.inf if folder is None else shutil.disk_usage(folder).free
    return Tier(
        "host" if folder is None else "disk", capacity_bytes, num_bytes / min(read[1:]), num_bytes / min(written[1:])
    )
