"""Memory that is freed goes back to the system."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from pipefit.runtime import malloc

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

getattr(malloc, sys.argv[1], lambda: None)()
before = resident_mb()
pieces = [bytearray(100_000) for _ in range(1000)] + [bytearray(4_000_000) for _ in range(25)]
del pieces
print(resident_mb() - before)
"""


def left_mb(what: str) -> float:
    """Megabytes still there of 200 that were let go of."""
    run = subprocess.run([sys.executable, "-c", SCRIPT, what], capture_output=True, text=True, check=True)
    return float(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_is_kept_for_the_next_step_or_given_back_as_is_asked():
    assert left_mb("keep_freed") > 150
    assert left_mb("give_back_freed") < 50
    assert left_mb("nothing") < 50
