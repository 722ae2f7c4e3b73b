"""Ranks as devices of equal speed, when there are more of them than cores.

A rank that shares a core would have all of it while the others wait for the network: the strategy that waits most
would seem to compute fastest. So every rank gets a fixed share of one core, and never more, by a control group with a
quota (cgroup v1 or v2). Where every rank has its own core, nothing is capped.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipefit.errors import PipefitError

# The ranks of a core leave the rest of it to the kernel's network work, and to others.
_USED = 0.9
_PERIOD_US = 20_000
# Beside other programs the ranks come first, up to their caps: else those that compute most would be slowed down most.
_WEIGHT = 16
_NAME = re.compile(r"pipefit-(\d+)-\d+")


@dataclass(frozen=True)
class Devices:
    """Where each rank computes, and how fast.

    Attributes:
        cores: of each rank, one.
        share: of its core that a rank gets; 1: all, without a cap.
    """

    cores: tuple[int, ...]
    share: float

    def take(self, rank: int) -> None:
        """This process computes on the core of a rank from now on."""
        os.sched_setaffinity(0, {self.cores[rank]})

    def describe(self) -> str:
        """One line for people."""
        if self.share == 1:
            return f"{len(self.cores)} ranks, each on a core of its own"
        return f"{len(self.cores)} ranks on {len(set(self.cores))} cores, each held to {self.share:.0%} of one"


def devices_for(num_ranks: int, cores: list[int]) -> Devices:
    """Ranks dealt out over cores, all of one speed.

    >>> devices_for(2, [0, 1]).share, devices_for(4, [0, 1])
    (1.0, Devices(cores=(0, 1, 0, 1), share=0.45))
    """
    most = -(-num_ranks // len(cores))
    share = 1.0 if most == 1 else round(_USED / most, 4)
    return Devices(tuple(cores[rank % len(cores)] for rank in range(num_ranks)), share)


def own_core(rank: int, num_ranks: int) -> None:
    """Keeps this process on a core of its own, where the machine has enough of them for all ranks."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})


def put(process: int, group: str) -> None:
    """Puts a process under the cap of a group that `capped` gave; "" is none.

    Whoever starts a rank must do it: in a network namespace `ip` mounts a /sys without control groups.
    """
    if group:
        (Path(group) / "cgroup.procs").write_text(str(process))


@contextlib.contextmanager
def capped(devices: Devices) -> Iterator[tuple[str, ...]]:
    """Control groups of the ranks for the length of a `with`; "" where none is needed and none can be had.

    Raises:
        PipefitError: ranks must share cores, and this system has no quota for them.
    """
    groups = _groups(devices)
    try:
        yield tuple(map(str, groups)) or ("",) * len(devices.cores)
    finally:
        _delete(groups)


def _groups(devices: Devices) -> list[Path]:
    """A group per rank; none where there need be none."""
    num, made = len(devices.cores), list[Path]()
    try:
        parent = _parent()
        _forget_dead(parent)
        for rank in range(num):
            group = parent / f"pipefit-{os.getpid()}-{rank}"
            group.mkdir()
            made.append(group)
            _limit(group, devices.share)
    except OSError as problem:
        _delete(made)
        if devices.share == 1:
            return []
        num_cores = len(set(devices.cores))
        raise PipefitError(
            f"{num} ranks would share {num_cores} cores, and this system cannot hold each to its part ({problem}); "
            f"use --ranks {num_cores}"
        ) from None
    return made


def _parent() -> Path:
    """The root of the hierarchy that has processor quotas."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (old / "cpu.cfs_quota_us").exists() or (old / "cpu.shares").exists():
        return old
    if "cpu" in (new / "cgroup.controllers").read_text().split():
        with (new / "cgroup.subtree_control").open("w") as file:
            file.write("+cpu")
        return new
    raise OSError("no control group of processors")


def _limit(group: Path, share: float) -> None:
    """Weight for all, and a quota for those that share a core."""
    quota = round(share * _PERIOD_US)
    if (group / "cpu.weight").exists():
        (group / "cpu.weight").write_text(str(100 * _WEIGHT))
        (group / "cpu.max").write_text(f"{quota if share < 1 else 'max'} {_PERIOD_US}")
        return
    (group / "cpu.shares").write_text(str(1024 * _WEIGHT))
    if share < 1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def _forget_dead(parent: Path) -> None:
    """Groups of killed runs; one with a process in it cannot be deleted and stays."""
    for group in parent.glob("pipefit-*"):
        match = _NAME.fullmatch(group.name)
        if match and not Path(f"/proc/{match.group(1)}").exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _delete(groups: list[Path]) -> None:
    """A group can go once its last process is gone, which the kernel may notice a little later."""
    deadline = time.monotonic() + 2.0
    for group in groups:
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
