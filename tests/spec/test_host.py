"""The memory that a process may use: of the machine, or of its control groups of version 1 or 2."""

import os
from pathlib import Path

import pytest

from pipefit.spec.host import usable_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED_V1 = "9223372036854771712"


def usable(tmp_path: Path, groups: str, limits: dict[str, str]) -> int:
    """The bytes where the kernel says that a process is in `groups`, and these files with limits exist."""
    own = tmp_path / "groups"
    own.write_text(groups)
    for name, limit in limits.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    return usable_bytes(own, tmp_path / "root")


V1 = "9:name=systemd:/\n4:memory:/a/b\n3:cpuset:/\n0::/\n"
V2 = "0::/a/b\n"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (V1, {}, MACHINE),
        (V1, {"memory/a/b/memory.limit_in_bytes": "1000"}, 1000),
        (V1, {"memory/a/memory.limit_in_bytes": "900", "memory/a/b/memory.limit_in_bytes": "1000"}, 900),
        (V1, {"memory/memory.limit_in_bytes": "800", "memory/a/b/memory.limit_in_bytes": UNLIMITED_V1}, 800),
        (V1, {"memory/a/b/memory.limit_in_bytes": UNLIMITED_V1}, MACHINE),
        (V1, {"memory/other/memory.limit_in_bytes": "7"}, MACHINE),
        (V2, {"a/b/memory.max": "1000"}, 1000),
        (V2, {"a/b/memory.max": "max", "a/memory.max": "900"}, 900),
        (V2, {"memory.max": "800"}, 800),
        (V2, {"a/b/memory.max": "max"}, MACHINE),
        ("", {"memory.max": "7"}, MACHINE),
    ],
)
def test_the_least_limit_of_a_group_and_of_those_above_it_counts(groups, limits, expected, tmp_path):
    assert usable(tmp_path, groups, limits) == expected


def test_without_control_groups_it_is_the_memory_of_the_machine(tmp_path):
    assert usable_bytes(tmp_path / "none", tmp_path) == MACHINE
