"""Gloo's threads: their scheduling on the cores that compute, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any


def let_carriers_wait() -> None:
    """Lets Gloo's threads take a core only when it is free or offered, not from a rank that computes (Linux only).

    A thread that takes it while the rank holds the lock of their connection spins in `epoll_wait` for that lock until
    the scheduler ends its time slice, some milliseconds later: 2 to 16 % of the steps of a small convolutional network.
    """
    tasks = Path("/proc/self/task")
    for thread in tasks.iterdir() if tasks.is_dir() else ():
        # It may have ended, or a sandbox may forbid it.
        with contextlib.suppress(OSError):
            if "gloo" in (thread / "comm").read_text():
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def let_go(held: Any) -> None:
    """Empties a list or dict of process groups in a thread: the end of each takes Gloo 10 ms."""
    threading.Thread(target=held.clear, name="pipefit-old-groups").start()
