"""The rates of a tier: bytes per second to and from the host's memory or a disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipefit.profiling.clock import Clock, median_of
from pipefit.spec.topology import Tier
from pipefit.spill.arena import aligned
from pipefit.spill.tier_file import record_sum
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import ALIGNMENT, Key
from pipefit.stage.accelerator import CPU


def measure_tier(
    folder: str | Path | None = None,
    device: str | torch.device = "cpu",
    *,
    capacity_bytes: float | None = None,
    num_bytes: int = 64 << 20,
    repeats: int = 4,
) -> Tier:
    """Measures the host's memory, or the disk of a folder, with the copies that spilling uses.

    Reads in isolation, writes in isolation, and both at once. They share one channel when the time together is longer
    than the mean of the two extremes: in parallel, and one after the other. On a disk the computing processor computes
    checksums, which are timed separately from the copies (on a GPU the copies include them).

    Args:
        folder: on the disk; None: the host's memory.
        device: at the other end of the copies.
        capacity_bytes: limit of the tier; None: the free space.
        num_bytes: of each of two records that are copied; fewer on a disk that has little room.
        repeats: of which the medians are taken; the first is a warm-up.

    Raises:
        TierError: the folder cannot be used, or has no room.
    """
    place = torch.device(device)
    name = f"probe-{os.getpid()}"
    tier = TierStore(folder, name, device=place)
    room = math.inf
    if folder is not None:  # two records, twice: half of what is free, where that is little
        free = shutil.disk_usage(folder).free
        num_bytes = min(num_bytes, max(free // 8 // ALIGNMENT, 1) * ALIGNMENT)
        room = free
    keys = Key(0, "weights"), Key(1, "weights")
    slots = [aligned(num_bytes, place).fill_(1) for _ in keys]
    try:
        tier.reserve(dict.fromkeys(keys, num_bytes))
        tier.write(keys[1], 0, slots[1]).wait()
        turns = [_turn(tier, keys, slots, version) for version in range(repeats)]
        check = 0.0
        if folder is not None and place.type == "cpu":
            check = _check_bytes_per_s(slots[0], repeats)
        commit_s = 0.0
        if tier.files:
            commit_s = _commit_s(tier, repeats)
    finally:
        tier.close()
        for file in Path(folder or os.devnull).glob(f"{name}.*"):
            file.unlink()
    read_s, write_s, both_s = map(median_of, zip(*turns[1:], strict=True))
    return Tier(
        "host" if folder is None else "disk",
        room if capacity_bytes is None else capacity_bytes,
        num_bytes / read_s,
        num_bytes / write_s,
        # In parallel both would take the longer of the two times, one after the other their sum.
        one_channel=both_s > (max(read_s, write_s) + read_s + write_s) / 2,
        check_bytes_per_s=check,
        commit_s=commit_s,
    )


def _turn(tier: TierStore, keys: Sequence[Key], slots: Sequence[Tensor], version: int) -> tuple[float, float, float]:
    """Seconds of reading, of writing, and of both at once."""
    write = tier.write(keys[0], 2 * version, slots[0])
    write.wait()
    read = tier.read(keys[0], 2 * version, slots[0])
    read.wait()
    read_s = read.ended_s - read.started_s
    write_s = write.ended_s - write.started_s
    write = tier.write(keys[0], 2 * version + 1, slots[0])
    read = tier.read(keys[1], 0, slots[1])
    write.wait()
    read.wait()
    both_s = max(read.ended_s, write.ended_s) - min(read.started_s, write.started_s)
    return read_s, write_s, both_s


def _commit_s(tier: TierStore, repeats: int) -> float:
    commits = [tier.commit(step, {}) for step in range(repeats)]
    for commit in commits:
        commit.wait()
    return median_of([commit.ended_s - commit.started_s for commit in commits[1:]])


def _check_bytes_per_s(slot: Tensor, repeats: int) -> float:
    clock = Clock(CPU)
    content = slot.numpy().data
    seconds = [clock.seconds(lambda: record_sum(content, "")) for _ in range(repeats)]
    return slot.numel() / median_of(seconds[1:])
