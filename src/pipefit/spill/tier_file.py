"""The file of a disk tier and what stands beside it: the table of its records, and the last committed step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipefit.errors import TierError
from pipefit.spec.files import sync_folder
from pipefit.units import format_bytes

__all__ = ["Aside", "Committed", "TierFile", "check_unused", "read_commits", "read_table"]

_FORMAT = "pipefit.tier/3"


class Aside(NamedTuple):
    """A file beside the records, with what a step needs of the weights and states that stay on the device.

    Attributes:
        name: of the file.
        num_bytes: of it.
        sha256: of it.
    """

    name: str
    num_bytes: int
    sha256: str

    def fits(self, folder: Path) -> bool:
        """Whether the file is whole."""
        try:
            with (folder / self.name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False


class Committed(NamedTuple):
    """A step whose records are whole.

    Attributes:
        step: weight updates done.
        version: of the records that belong to it.
        state: what else must be known to go on from there.
        aside: what is too much for `state`; None: nothing.
    """

    step: int
    version: int
    state: bytes
    aside: Aside | None = None


class TierFile:
    """An open file; every failure becomes one message that says what is still whole.

    Attributes:
        path: of the file.
        is_direct: whether it is read and written past the page cache.
    """

    def __init__(self, folder: Path, name: str, direct: bool) -> None:
        self.path = folder / f"{name}.tier"
        self._table = folder / f"{name}.json"
        self._commit, self._before = (folder / f"{name}.{ending}" for ending in ("commit", "before"))
        self._asides = tuple(folder / f"{name}.aside-{number}" for number in (0, 1))
        self._step: int | None = None
        self._aside = ""
        try:
            folder.mkdir(exist_ok=True)
            self._fd, self.is_direct = _open(self.path, direct)
        except OSError as problem:
            told = {errno.ENOENT: f"{folder.parent} is not there", errno.EEXIST: "it is a file, not a folder"}
            why = told.get(problem.errno or 0, problem.strerror)
            raise TierError(f"{folder}: cannot keep spilled records there: {why}") from None
        try:
            _take(self._fd, self.path)
        except TierError:
            os.close(self._fd)
            raise
        self._inode = os.fstat(self._fd).st_ino

    def cure(self) -> str:
        """What is left to go on from."""
        if self._step is None:
            return "no step was committed"
        if not self.path.exists():
            return f"it held step {self._step}, the last committed; put it back, or go on from a checkpoint"
        return f"the last committed step, {self._step}, is whole"

    def allocate(self, num_bytes: int) -> None:
        """Takes all the room at once; what an earlier run committed is no longer valid.

        Raises:
            TierError: there is not enough.
        """
        try:
            for path in (self._commit, self._before, *self._asides):
                path.unlink(missing_ok=True)
            sync_folder(self.path.parent)
            os.ftruncate(self._fd, 0)
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None
        self.extend(num_bytes)

    def extend(self, num_bytes: int) -> None:
        """Takes room up to a size.

        Raises:
            TierError: there is not enough.
        """
        had = os.fstat(self._fd).st_size
        try:
            if num_bytes:
                os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, had)
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

    def spare(self) -> Path:
        """A file beside the records that the last committed step does not need."""
        return next(path for path in self._asides if path.name != self._aside)

    def commit(self, step: int, version: int, state: bytes, aside: Aside | None = None) -> None:
        """Forces everything to the disk, then names the step whose records are whole; the one before stays beside it.

        Raises:
            TierError: the disk refused, or the folder is no longer there.
        """
        try:
            os.fdatasync(self._fd)
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "it is no longer the file that was opened")
            facts = {"format": _FORMAT, "step": step, "version": version, "aside": aside}
            facts |= {"bytes": len(state), "checksum": zlib.crc32(state)}
            temporary = self._commit.with_suffix(".writing")
            _write(temporary, json.dumps(facts).encode() + b"\n" + state)
            if self._step is not None:
                self._commit.replace(self._before)
            temporary.replace(self._commit)
            # What is written next overwrites the step before: the names must be on the disk first.
            sync_folder(self.path.parent)
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None
        self._step, self._aside = step, aside.name if aside else ""

    def commits(self) -> list[Committed]:
        """The committed steps whose records may be whole, the last one first."""
        found = read_commits(self.path.parent, self.path.stem)
        self._stands_at(found[0] if found else None)
        return found

    def fits(self, committed: Committed) -> bool:
        """Whether what lies beside the records of a step is whole."""
        return committed.aside is None or committed.aside.fits(self.path.parent)

    def _stands_at(self, committed: Committed | None) -> None:
        self._step = committed.step if committed else None
        self._aside = committed.aside.name if committed and committed.aside else ""

    def goes_on_from(self, committed: Committed) -> None:
        """Forgets what was committed after a step.

        Raises:
            TierError: the folder cannot be written.
        """
        try:
            with contextlib.suppress(TierError):
                if _read_commit(self._commit) == committed:
                    return
            if _read_commit(self._before) == committed:
                self._before.replace(self._commit)
                sync_folder(self.path.parent)
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.cure()}") from None
        finally:
            self._stands_at(committed)

    def write_table(self, rows: list[list[Any]], about: Mapping[str, Any]) -> None:
        """Notes where the records lie, and of what they are."""
        try:
            temporary = self._table.with_suffix(".writing")
            _write(temporary, json.dumps({"format": _FORMAT, "about": about, "records": rows}).encode())
            temporary.replace(self._table)
            sync_folder(self.path.parent)
        except OSError as problem:
            raise TierError(f"{self._table}: {problem.strerror}") from None

    def table(self) -> tuple[list[list[Any]], dict[str, Any]]:
        """Where the records lie, and of what they are."""
        return read_table(self.path.parent, self.path.stem)

    def close(self) -> None:
        """Closes it; it stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Removes it and what stands beside it."""
        for path in (self._commit, self._before, *self._asides, self._table, self.path):
            with contextlib.suppress(OSError):
                path.unlink()


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """Opens or makes a file, past the page cache if that is wanted and possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600), True
    return os.open(path, flags, 0o600), False


def _take(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise TierError(f"{path}: another run uses it; give each run a --disk folder of its own") from None


def check_unused(folder: Path, name: str) -> None:
    """Refuses a tier that a run has open.

    Raises:
        TierError: one has.
    """
    path = folder / f"{name}.tier"
    with contextlib.suppress(OSError), path.open("rb") as file:
        _take(file.fileno(), path)


def read_commits(folder: Path, name: str) -> list[Committed]:
    """The committed steps of a tier, the last one first; none where there is no tier.

    Raises:
        TierError: what is there cannot be read.
    """
    found, problems = [], []
    for ending in ("commit", "before"):
        try:
            found.append(_read_commit(folder / f"{name}.{ending}"))
        except TierError as problem:
            problems.append(problem)
    whole = [committed for committed in found if committed is not None]
    if problems and not whole:
        raise problems[0]
    return whole


def _read_commit(path: Path) -> Committed | None:
    try:
        head, _, state = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        if len(state) != facts["bytes"] or zlib.crc32(state) != facts["checksum"]:
            raise ValueError("it does not fit its checksum")
        aside = Aside(*facts["aside"]) if facts["aside"] else None
        return Committed(int(facts["step"]), int(facts["version"]), state, aside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise TierError(f"{path} cannot be read: {problem}; go on from a checkpoint") from None


def read_table(folder: Path, name: str) -> tuple[list[list[Any]], dict[str, Any]]:
    """Where the records of a tier lie, and of what they are.

    Raises:
        TierError: they cannot be read.
    """
    path = folder / f"{name}.json"
    try:
        data = json.loads(path.read_text())
        return list(data["records"]), dict(data["about"])
    except (OSError, ValueError, KeyError) as problem:
        raise TierError(f"{path} cannot be read: {problem}; go on from a checkpoint") from None


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
