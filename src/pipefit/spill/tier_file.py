"""The files of a disk tier: the records, the table that says where they lie, and the last two commits.

rank-0.tier                     the records, preallocated
rank-0.json                     table: where each record lies, and what the records are of
rank-0.commit, rank-0.before    the last commit and the one before it
rank-0.state-0, rank-0.state-1  safetensors that a commit names, written alternately
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.spec.files import sync_folder
from pipefit.spec.sealed import FileEntry, read_sealed, write_file, write_sealed
from pipefit.spill.tiers import WEIGHTS, Key
from pipefit.units import format_bytes

FORMAT = "pipefit.tier/4"


class Written(NamedTuple):
    """A record of a commit: its version, and which of its copies in the file holds it."""

    version: int
    copy: int


class Room(NamedTuple):
    """A record's room in the file.

    Attributes:
        start: of its first copy.
        num_bytes: of its payload.
        copies: 2 for one that is committed: the copy that the last commit names is never overwritten.
    """

    start: int
    num_bytes: int
    copies: int


class Commit(NamedTuple):
    """A step whose records are whole.

    Attributes:
        step: weight updates done.
        state: JSON data: what else is needed to resume from there.
        records: that belong to it.
        tensors: a safetensors file with more of what is needed; None: nothing.
    """

    step: int
    state: dict[str, Any]
    records: dict[Key, Written]
    tensors: FileEntry | None = None

    def version(self, stage: int) -> int:
        """The version of a stage's weights."""
        return self.records[Key(stage, WEIGHTS)].version


class TierFile:
    """The files of an open tier; every failure becomes one message that says what is still whole.

    Args:
        folder: of the files; made if its parent exists.
        name: of the files, without ending.
        direct: whether to read and write past the page cache, where the file system allows it.
        shared: whether other processes may have it open; then commits survive the death of one, and no power cut.

    Attributes:
        path: of the records.

    Raises:
        TierError: the folder cannot be used, or another run uses the file.
    """

    def __init__(self, folder: Path, name: str, direct: bool, shared: bool) -> None:
        self.path = folder / f"{name}.tier"
        self._table = folder / f"{name}.json"
        self._commit, self._before = (folder / f"{name}.{ending}" for ending in ("commit", "before"))
        self._tensors = tuple(folder / f"{name}.state-{number}" for number in (0, 1))
        self._durable = not shared
        self._last: Commit | None = None
        try:
            folder.mkdir(exist_ok=True)
            self._fd = _open(self.path, direct)
        except OSError as problem:
            known = {errno.ENOENT: f"{folder.parent} is not there", errno.EEXIST: "it is a file, not a folder"}
            why = known.get(problem.errno or 0, problem.strerror)
            raise TierError(f"{folder}: cannot keep spilled records there: {why}") from None
        try:
            if not shared:
                _lock(self._fd, self.path)
        except TierError:
            os.close(self._fd)
            raise
        self._inode = os.fstat(self._fd).st_ino

    def status(self) -> str:
        """A message's end: what is left to resume from."""
        if self._last is None:
            return "no step was committed"
        if not self.path.exists():
            return f"it held step {self._last.step}, the last committed; put it back, or resume from a checkpoint"
        return f"the last committed step, {self._last.step}, is whole"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Makes failures of the file system messages that say what is left."""
        try:
            yield
        except TierError:
            raise
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.status()}") from None
        except PipefitError as problem:
            raise TierError(f"{problem}; {self.status()}") from None

    # ---- room ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> None:
        """Takes all the room at once; what an earlier run committed is no longer valid.

        Raises:
            TierError: there is not enough.
        """
        with self._explained():
            for path in (self._commit, self._before, *self._tensors):
                path.unlink(missing_ok=True)
            sync_folder(self.path.parent)
            os.ftruncate(self._fd, 0)
        self.extend(num_bytes)

    def extend(self, num_bytes: int) -> None:
        """Takes room up to a size.

        Raises:
            TierError: there is not enough.
        """
        before = os.fstat(self._fd).st_size
        with self._explained():
            try:
                if num_bytes:
                    os.posix_fallocate(self._fd, 0, num_bytes)
            except OSError as problem:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, before)
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                free = shutil.disk_usage(self.path.parent).free
                raise TierError(
                    f"{self.path.parent}: the spilled model needs {format_bytes(num_bytes)} there, "
                    f"{format_bytes(free)} are free; make room, or give another --disk folder"
                ) from None

    def check_size(self, num_bytes: int) -> None:
        """Refuses a truncated file.

        Raises:
            TierError: it is smaller than its records.
        """
        size = os.fstat(self._fd).st_size
        if size < num_bytes:
            raise DamageError(f"{self.path}: its records take {num_bytes} bytes, the file has {size}: it was truncated")

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def read(self, data: memoryview, position: int) -> None:
        """Fills `data` from a position."""
        self._transfer(os.preadv, data, position)

    def write(self, data: memoryview, position: int) -> None:
        """Writes `data` at a position."""
        self._transfer(os.pwritev, data, position)

    def _transfer(self, call: Any, data: memoryview, position: int) -> None:
        done = 0
        with self._explained():
            while done < len(data):
                count = call(self._fd, [data[done:]], position + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count

    # ---- commits ---------------------------------------------------------------------------------------------------

    def spare(self) -> Path:
        """The path for tensors of the next commit; the last commit does not name it."""
        last = self._last.tensors if self._last else None
        return next(path for path in self._tensors if last is None or path.name != last.name)

    def write_spare(self, content: bytes) -> FileEntry:
        """Writes the tensors of the next commit.

        Raises:
            TierError: the disk refused.
        """
        path = self.spare()
        with self._explained():
            path.unlink(missing_ok=True)
            return write_file(path, [content])

    def commit(self, commit: Commit) -> None:
        """Forces the records to disk, then names the step they belong to; the commit before it stays as well.

        Raises:
            TierError: the disk refused, or the folder is no longer there.
        """
        data = {
            "format": FORMAT,
            "step": commit.step,
            "state": commit.state,
            "records": [[*key, *written] for key, written in commit.records.items()],
            "tensors": msgspec.structs.astuple(commit.tensors) if commit.tensors else None,
        }
        with self._explained():
            if self._durable:
                os.fdatasync(self._fd)
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "it is no longer the file that was opened")
            if self._durable and self._commit.exists():
                self._commit.replace(self._before)
            # What is written next overwrites the step before: when this returns, the names are on the disk.
            write_sealed(self._commit, data, durable=self._durable)
        self._last = commit

    def commits(self) -> list[Commit]:
        """The committed steps whose records may be whole, the last one first."""
        found = read_commits(self.path.parent, self.path.stem)
        self._last = found[0] if found else None
        return found

    def resume_from(self, commit: Commit) -> None:
        """Forgets what was committed after a step.

        Raises:
            TierError: the folder cannot be written.
        """
        self._last = commit
        with self._explained():
            with contextlib.suppress(TierError):
                if _read_commit(self._commit) == commit:
                    return
            if _read_commit(self._before) == commit:
                self._before.replace(self._commit)
                sync_folder(self.path.parent)

    def write_table(self, records: Mapping[Key, Room], about: Mapping[str, Any]) -> None:
        """Notes where the records lie, and what they are of.

        Raises:
            TierError: the disk refused.
        """
        rows = [[*key, *room] for key, room in records.items()]
        try:
            write_sealed(self._table, {"format": FORMAT, "about": about, "records": rows}, durable=self._durable)
        except PipefitError as problem:
            raise TierError(str(problem)) from None

    def close(self) -> None:
        """Closes the files; they stay."""
        os.close(self._fd)

    def remove(self) -> None:
        """Removes the files."""
        for path in (self._commit, self._before, *self._tensors, self._table, self.path):
            with contextlib.suppress(OSError):
                path.unlink()


def _open(path: Path, direct: bool) -> int:
    """Opens or makes a file, past the page cache if that is wanted and possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600)
    return os.open(path, flags, 0o600)


def _lock(handle: int, path: Path) -> None:
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
        _lock(file.fileno(), path)


def read_commits(folder: Path, name: str) -> list[Commit]:
    """The committed steps of a tier, the last one first; none where there is no tier.

    Raises:
        TierError: none of those that are there can be read.
    """
    found, problems = [], []
    for ending in ("commit", "before"):
        try:
            found.append(_read_commit(folder / f"{name}.{ending}"))
        except TierError as problem:
            problems.append(problem)
    whole = [commit for commit in found if commit is not None]
    if problems and not whole:
        raise problems[0]
    return whole


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_sealed(path, FORMAT, DamageError)
    except FileNotFoundError:
        return None
    except DamageError as problem:
        raise DamageError(f"{problem}; resume from a checkpoint") from None


def _read_commit(path: Path) -> Commit | None:
    data = _read(path)
    if data is None:
        return None
    records = {Key(*row[:3]): Written(*row[3:]) for row in data["records"]}
    return Commit(data["step"], data["state"], records, FileEntry(*data["tensors"]) if data["tensors"] else None)


def read_table(folder: Path, name: str) -> tuple[dict[Key, Room], dict[str, Any]]:
    """Where the records of a tier lie, and what they are of.

    Raises:
        TierError: the table cannot be read.
    """
    path = folder / f"{name}.json"
    data = _read(path)
    if data is None:
        raise DamageError(f"{path}: missing; resume from a checkpoint")
    return {Key(*row[:3]): Room(*row[3:]) for row in data["records"]}, data["about"]
