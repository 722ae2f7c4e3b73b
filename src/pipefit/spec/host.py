"""The memory of this machine that a process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LIMITS = {"memory": "memory/{}/memory.limit_in_bytes", "": "{}/memory.max"}
"""For the controllers of a line of /proc/PID/cgroup, in versions 1 and 2: the file with a group's limit."""


def usable_bytes(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: those of the machine, or the least limit of its control groups.

    The limits of all groups above count too. In a container its own group may be the root.

    Args:
        groups: the file that names the groups of this process.
        root: folder of all groups.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # only Linux has groups
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            group = Path(name.lstrip("/"))
            for place in (group, *group.parents):
                with contextlib.suppress(OSError, KeyError, ValueError):  # ValueError: "max"
                    limits.append(int((root / _LIMITS[controllers].format(place)).read_text(encoding="utf-8")))
    return min(limits)
