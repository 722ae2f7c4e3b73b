"""A store of processes on one machine: a file for each key, in a folder of the run.

torch's `FileStore` looks for a key that another process has yet to set every 10 ms, and each process group begins with
such waits.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipefit.spec.files import write_atomically

TIMEOUT = timedelta(minutes=30)
"""Of a wait of torch for other processes."""

_OVER = ".over"
_LOCK = ".lock"
_INTERVAL_S = 0.0002
"""Seconds between the first two looks for a key."""


class FolderStore(dist.Store):
    """A store in a folder, which the first process makes.

    The newest one of a process stays: torch keeps only the part of it that is written in C++.
    """

    _newest: FolderStore

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True)
        self._folder = folder
        FolderStore._newest = self

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "%")

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        write_atomically(self._file(key), value, durable=False)

    def get(self, key: str) -> bytes:
        """Waits for a key; returns its value."""
        self.wait([key])
        return self._file(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        """Adds to the number of a key, which begins with 0; returns the sum."""
        with self._file(_LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.check([key]):
                amount += int(self.get(key))
            self.set(key, str(amount))
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        """Waits for keys.

        Raises:
            RuntimeError: a process is lost that may have to set them, or they do not come in time.
        """
        began = time.monotonic()
        while not self.check(keys):
            passed_s = time.monotonic() - began
            if self._file(_OVER).exists():
                raise RuntimeError(f"Connection closed by peer: no process will set {keys}")
            if passed_s > timeout.total_seconds():
                raise RuntimeError(f"Timed out waiting for {keys}")
            time.sleep(min(_INTERVAL_S + passed_s / 20, 0.01))


def end_waits(folder: Path) -> None:
    """Ends the waits of all processes for keys of a store, also those to come."""
    FolderStore(folder).set(_OVER, "")
