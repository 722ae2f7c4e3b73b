"""The file of a disk tier and what stands beside it: the table of its records, and the last committed step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pipefit.errors import TierError
from pipefit.units import format_bytes

__all__ = ["TierFile"]


class TierFile:
    """An open file; every failure becomes one message that says what is still whole.

    Attributes:
        path: of the file.
        is_direct: whether it is read and written past the page cache.
    """

    def __init__(self, folder: Path, name: str, direct: bool) -> None:
        self.path = folder / f"{name}.tier"
        self._table = folder / f"{name}.json"
        self._commit = folder / f"{name}.commit"
        self._step: int | None = None
        try:
            folder.mkdir(exist_ok=True)
            self._fd, self.is_direct = _open(self.path, direct)
        except OSError as problem:
            raise TierError(f"{folder}: cannot keep spilled records there: {problem.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise TierError(f"{self.path}: another run uses it; give each run a --disk folder of its own") from None
        self._inode = os.fstat(self._fd).st_ino

    def cure(self) -> str:
        """What is left to go on from."""
        return "no step was committed" if self._step is None else f"the last committed step, {self._step}, is whole"

    def allocate(self, num_bytes: int) -> None:
        """Takes all the room at once; what an earlier run committed is no longer valid.

        Raises:
            TierError: there is not enough.
        """
        try:
            self._commit.unlink(missing_ok=True)
            os.ftruncate(self._fd, 0)
            if num_bytes:
                os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = shutil.disk_usage(self.path.parent).free
                raise TierError(
                    f"{self.path.parent}: the spilled model needs {format_bytes(num_bytes)} there, "
                    f"{format_bytes(free)} are free; make room, or give another --disk folder"
                ) from None
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None

    def check_size(self, num_bytes: int) -> None:
        """Refuses a file that was cut short.

        Raises:
            TierError: it is smaller than its records.
        """
        size = os.fstat(self._fd).st_size
        if size < num_bytes:
            raise TierError(f"{self.path}: its records take {num_bytes} bytes, the file has {size}; it was cut short")

    def read(self, data: memoryview, position: int) -> None:
        """Fills `data` from a position."""
        self._all(os.preadv, data, position)

    def write(self, data: memoryview, position: int) -> None:
        """Writes `data` at a position."""
        self._all(os.pwritev, data, position)

    def _all(self, call: Any, data: memoryview, position: int) -> None:
        done = 0
        try:
            while done < len(data):
                count = call(self._fd, [data[done:]], position + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None

    def commit(self, step: int, state: bytes) -> None:
        """Forces everything to the disk, then names the step whose records are whole.

        Raises:
            TierError: the disk refused, or the folder is no longer there.
        """
        try:
            os.fdatasync(self._fd)
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "it is no longer the file that was opened")
            head = json.dumps({"format": "pipefit.tier/1", "step": step, "state_bytes": len(state)}).encode()
            temporary = self._commit.with_suffix(".writing")
            with temporary.open("wb") as file:
                file.write(head + b"\n" + state)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._commit)
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None
        self._step = step

    def committed(self) -> tuple[int, bytes]:
        """The last committed step and its state.

        Raises:
            TierError: there is none.
        """
        try:
            head, _, state = self._commit.read_bytes().partition(b"\n")
            found = json.loads(head)
            self._step = int(found["step"])
            if len(state) != found["state_bytes"]:
                raise ValueError("cut short")
        except FileNotFoundError:
            raise TierError(f"{self._commit} is not there: no step was committed in this folder") from None
        except (OSError, ValueError, KeyError) as problem:
            raise TierError(f"{self._commit} cannot be read: {problem}") from None
        return self._step, state

    def write_table(self, rows: list[list[Any]]) -> None:
        """Notes where the records lie."""
        try:
            temporary = self._table.with_suffix(".writing")
            temporary.write_text(json.dumps({"format": "pipefit.tier/1", "records": rows}))
            temporary.replace(self._table)
        except OSError as problem:
            raise TierError(f"{self._table}: {problem.strerror}") from None

    def read_table(self) -> list[list[Any]]:
        """Where the records lie."""
        try:
            return list(json.loads(self._table.read_text())["records"])
        except (OSError, ValueError, KeyError) as problem:
            raise TierError(f"{self._table} cannot be read: {problem}") from None

    def close(self) -> None:
        """Closes it; it stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Removes it and what stands beside it."""
        for path in (self._commit, self._table, self.path):
            with contextlib.suppress(OSError):
                path.unlink()


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """Opens or makes a file, past the page cache if that is wanted and possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600), True
    return os.open(path, flags, 0o600), False
