"""The files of a disk tier: the records, facts about them, and the last two commits.

rank-0.tier                     the records, preallocated
rank-0.json                     facts that identify the records: model, run and optimizer
rank-0.commit, rank-0.before    the last commit and the one before it: complete records, their places and checksums

A record that is committed has two copies, written alternately, so that the one that the last commit names is never
overwritten. A record that does not have the checksum of its commit was damaged by the disk, or is not in its place: a
checksum begins with the names of the run and its rank, the record and its version.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.spec.files import JsonObject, sync_folder
from pipefit.spec.lock import locked
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.spill.tiers import WEIGHTS, Key
from pipefit.units import format_bytes

FORMAT = "pipefit.tier/6"
_PIECE_BYTES = 16 << 20
_THREADS = 2


class Written(NamedTuple):
    """A record in the file.

    Attributes:
        start: position of its first copy.
        num_bytes: of each copy.
        copies: 2 for one that is committed, else 1; 0 for one in the host's memory that is not committed.
        version: written last; −1: none.
        copy: the one that holds it; −1: none.
        checksum: of its bytes.
    """

    start: int
    num_bytes: int
    copies: int
    version: int = -1
    copy: int = -1
    checksum: int = 0

    def position(self, copy: int) -> int:
        """The position of a copy."""
        return self.start + copy * self.num_bytes

    @property
    def requested(self) -> int | None:
        """The version; None: none was written."""
        if self.copy < 0:
            return None
        return self.version

    @property
    def end(self) -> int:
        """The end of the last copy."""
        return self.position(self.copies)


class Commit(NamedTuple):
    """A step with complete records.

    Attributes:
        step: weight updates done.
        state: JSON data: the other state that is needed to resume.
        records: of the step.
        tier: names of the run and of the files, "8f14e45fceea167a rank-0".
    """

    step: int
    state: JsonObject
    records: dict[Key, Written]
    tier: str = ""

    @property
    def run(self) -> str:
        """The name of the run, the same on all its ranks."""
        return self.tier.partition(" ")[0]

    @property
    def name(self) -> str:
        """The name of the files."""
        return self.tier.partition(" ")[2]

    def version(self, stage: int) -> int:
        """The version of a stage's weights."""
        return self.records[Key(stage, WEIGHTS)].version


_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Committed(msgspec.Struct):
    """The document of a commit: a record is a row, its key and then its `Written`."""

    step: _Step
    state: JsonObject
    records: list[list[Any]]
    tier: str


def place_of(tier: str, key: Key, version: int) -> str:
    """The place of a record, with which its checksum begins."""
    return f"{tier}: {key}, version {version}"


def record_sum(data: memoryview, place: str) -> int:
    """The checksum of a record in its place: XXH3 with 64 bits, whose seed is the CRC-32 of the place.

    One core computes 24 GB/s; call it where nothing else computes.

    Args:
        data: of the record.
        place: its run, rank, name and version.
    """
    return xxhash.xxh3_64_intdigest(data, zlib.crc32(place.encode()))


class TierFile:
    """The files of an open tier; every failure becomes one message that names the last complete step.

    Args:
        folder: of the files; made if its parent exists.
        name: of the files, without suffix.
        shared: whether other processes may have it open; then commits survive the death of one, and no power cut. Else
            it is read and written past the page cache, where the file system allows it.

        run: name of the run where it is new; "": a name of its own.

    Attributes:
        path: of the records.
        tier: names of the run and of the files; that of an earlier run once its commits are read.

    Raises:
        TierError: the folder cannot be used, or another run uses the file.
    """

    def __init__(self, folder: Path, name: str, shared: bool, run: str = "") -> None:
        self.tier = f"{run or new_run()} {name}"
        self.path = folder / f"{name}.tier"
        self._about = folder / f"{name}.json"
        self._commit = folder / f"{name}.commit"
        self._before = folder / f"{name}.before"
        self._durable = not shared
        # Pieces of a record are copied in parallel: reads and writes have separate pools, so that neither waits.
        self._pools = [ThreadPoolExecutor(_THREADS, f"pipefit-p{way}") for way in ("read", "write")]
        self._last: Commit | None = None
        try:
            folder.mkdir(exist_ok=True)
            self._fd = _open(self.path, direct=not shared)
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
        """The end of a message: the step from which a run can resume."""
        if self._last is None:
            return "no step was committed"
        if not self.path.exists():
            return f"it held step {self._last.step}, the last committed; put it back, or resume from a checkpoint"
        return f"the last committed step, {self._last.step}, is whole"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns failures of the file system into messages that name the last complete step."""
        try:
            yield
        except TierError:
            raise
        except OSError as problem:
            raise TierError(f"{self.path}: {problem.strerror}; {self.status()}") from None
        except PipefitError as problem:
            raise TierError(f"{problem}; {self.status()}") from None

    # ---- room ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, about: Mapping[str, Any] | None) -> None:
        """Reserves all the space at once; commits of an earlier run are no longer valid.

        Args:
            num_bytes: of all records.
            about: JSON data that identifies them; None: not needed.

        Raises:
            TierError: there is not enough.
        """
        with self._explained():
            self._commit.unlink(missing_ok=True)
            self._before.unlink(missing_ok=True)
            sync_folder(self.path.parent)
            os.ftruncate(self._fd, 0)
            self.extend(num_bytes)
            if about is not None:
                write_sealed(self._about, {"format": FORMAT, "about": about})

    def extend(self, num_bytes: int) -> None:
        """Reserves space up to a size.

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

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def read(self, data: memoryview, position: int) -> None:
        """Fills `data` with a record."""
        self._in_pieces(os.preadv, self._pools[0], data, position)

    def write(self, data: memoryview, position: int) -> None:
        """Writes a record."""
        self._in_pieces(os.pwritev, self._pools[1], data, position)

    def _in_pieces(self, call: Any, pool: ThreadPoolExecutor, data: memoryview, position: int) -> None:
        def transfer(start: int) -> None:
            self._transfer(call, data[start : start + _PIECE_BYTES], position + start)

        starts = range(0, len(data), _PIECE_BYTES)
        if self._durable and len(starts) > 1:
            list(pool.map(transfer, starts))
            return
        for start in starts:
            transfer(start)

    def checksum(self, data: memoryview, key: Key, version: int) -> int:
        """The checksum of a version of a record."""
        return record_sum(data, place_of(self.tier, key, version))

    def is_whole(self, commit: Commit, key: Key) -> bool:
        """Returns whether a committed record has its checksum, or was not written yet."""
        at = commit.records[key]
        if at.copy < 0:
            return True
        if at.num_bytes:
            buffer = memoryview(mmap.mmap(-1, at.num_bytes))
        else:
            buffer = memoryview(b"")
        self.read(buffer, at.position(at.copy))
        return at.checksum == record_sum(buffer, place_of(commit.tier, key, at.version))

    def _transfer(self, call: Any, data: memoryview, position: int) -> None:
        done = 0
        with self._explained():
            while done < len(data):
                count = call(self._fd, [data[done:]], position + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count

    # ---- commits ---------------------------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> None:
        """Forces the records to disk, then commits their step; the commit before it stays as well.

        Raises:
            TierError: the disk refused, or the folder is no longer there.
        """
        rows = [[*key, *written] for key, written in commit.records.items()]
        with self._explained():
            if self._durable:
                os.fdatasync(self._fd)
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "it is no longer the file that was opened")
            if self._durable and self._commit.exists():
                self._commit.replace(self._before)
            # Later writes overwrite the step before, so the new commit must be on the disk when this returns.
            data = {"format": FORMAT, "step": commit.step, "state": commit.state, "records": rows, "tier": self.tier}
            write_sealed(self._commit, data, durable=self._durable)
        self._last = commit

    def commits(self) -> list[Commit]:
        """The committed steps whose records may be complete, the last one first.

        Raises:
            TierError: there is none, or the records were truncated.
        """
        found = read_commits(self.path.parent, self.path.stem)
        if not found:
            raise TierError(f"{self.path.parent}: no step was committed there")
        self._last = found[0]
        if found[0].name != self.path.stem:
            raise DamageError(
                f"{self.path}: its last commit is one of {found[0].name}: the files of two ranks have changed places"
            )
        needed = max((written.end for written in found[0].records.values()), default=0)
        if (size := os.fstat(self._fd).st_size) < needed:
            raise DamageError(f"{self.path}: its records take {needed} bytes, the file has {size}: it was truncated")
        return found

    def resume_from(self, commit: Commit) -> None:
        """Removes the commits after a step.

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

    def close(self, discard: bool) -> None:
        """Closes the files; removes them if `discard` is set."""
        for pool in self._pools:
            pool.shutdown()
        os.close(self._fd)
        if discard:
            for path in (self._commit, self._before, self._about, self.path):
                with contextlib.suppress(OSError):
                    path.unlink()


def new_run() -> str:
    """A name for a new run."""
    return uuid.uuid4().hex[:16]


def _open(path: Path, direct: bool) -> int:
    """Opens or makes a file, bypassing the page cache if requested and possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600)
    return os.open(path, flags, 0o600)


def _lock(handle: int, path: Path) -> None:
    if not locked(handle):
        raise TierError(f"{path}: another run uses it; give each run its own --disk folder")


def check_unused(folder: Path, name: str) -> None:
    """Refuses a tier that a run has open.

    Raises:
        TierError: a run has it open.
    """
    path = folder / f"{name}.tier"
    with contextlib.suppress(OSError), path.open("rb") as file:
        _lock(file.fileno(), path)


def read_commits(folder: Path, name: str) -> list[Commit]:
    """The committed steps of a tier, the last one first; none where there is no tier.

    Raises:
        TierError: there are commits, but none can be read.
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


def _read(path: Path) -> JsonObject | None:
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
    try:
        found = msgspec.convert(data, _Committed)
        records = {msgspec.convert(row[:3], Key): msgspec.convert(row[3:], Written) for row in found.records}
    except msgspec.ValidationError as problem:
        raise DamageError(f"{path}: cannot be read: {problem}; resume from a checkpoint") from None
    return Commit(found.step, found.state, records, found.tier)


def read_about(folder: Path, name: str) -> JsonObject:
    """Facts that identify the records of a tier: model, run and optimizer.

    Raises:
        TierError: it cannot be read.
    """
    path = folder / f"{name}.json"
    data = _read(path)
    if data is None:
        raise DamageError(f"{path}: missing; resume from a checkpoint")
    about = data.get("about")
    if not isinstance(about, dict):
        raise DamageError(f"{path}: about: expected an object, got {type(about).__name__}; resume from a checkpoint")
    return about
