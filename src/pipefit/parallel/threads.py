"""Gloo's threads on the cores of those that compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_CARRIER = "gloo_tcp_loop"


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Groups made meanwhile have carrier threads that do not interrupt whoever has the core (Linux; else nothing).

    Gloo's thread that reads a connection only tries its lock: while another thread holds it, to send, the reader asks
    the kernel again and again. Where it has woken up on the sender's core, and taken it, it does so for its whole slice
    of time, milliseconds, before the sender can go on. As a batch thread it gets the core when the sender lets go of
    it. That is right for groups whose members wait for every message; where messages travel while their sender
    computes, it would make them late.
    """
    before = _tasks()
    try:
        yield
    finally:
        for task in _tasks() - before:
            with contextlib.suppress(OSError):
                if (_TASKS / str(task) / "comm").read_text().strip() == _CARRIER:
                    os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))


def _tasks() -> set[int]:
    """The threads of this process."""
    return {int(path.name) for path in _TASKS.iterdir()} if _TASKS.is_dir() else set()
