"""The disk tier: one preallocated file, read and written past the page cache where the file system allows it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.spec.sealed import FileEntry
from pipefit.spill.arena import aligned, pin, unpin
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.records import HEADER_BYTES, RecordHeader, chunk_sum
from pipefit.spill.tier_file import Commit, Room, TierFile, Written, read_table
from pipefit.spill.tiers import ALIGNMENT, Key
from pipefit.units import format_bytes

_CHUNK_BYTES = 16 << 20
_THREADS = 2


@dataclass
class _Record:
    """A record and where it lies.

    Attributes:
        room: in the file.
        is_committed: whether commits name it.
        current: the copy that was written last; −1: none.
        committed: the copy that the last commit names, which is not overwritten; −1: none.
        version: of the current copy.
        requested: the version that `write` was called with last.
        written: the last write.
    """

    room: Room
    is_committed: bool
    current: int = -1
    committed: int = -1
    version: int = -1
    requested: int | None = None
    written: Copy | None = None

    @property
    def num_bytes(self) -> int:
        return self.room.num_bytes

    def position(self, copy: int) -> int:
        return self.room.start + copy * (HEADER_BYTES + self.room.num_bytes)

    @property
    def end(self) -> int:
        return self.position(self.room.copies)

    @property
    def next_copy(self) -> int:
        """The copy to write."""
        return 1 - self.committed if self.room.copies == 2 and self.committed >= 0 else 0

    def restore(self, written: Written) -> None:
        self.current = self.committed = written.copy
        self.version = self.requested = written.version


class DiskTier:
    """Records in a file, each with version and checksum; those that are committed have two copies.

    A run that is cut off resumes from `recover`: the records of the last committed step are whole, because later
    writes go to the other copy of each.

    Attributes:
        about: JSON data: what the records are of; set it before `reserve`, read it after `recover`.
        files: of the tier.

    Args:
        folder: for the file; made if its parent exists.
        name: of the file, without ending; one for each rank or trial.
        lanes: shared with other stores; None: its own.
        direct: whether to read and write past the page cache; ignored where the file system refuses that.
        device: whose memory the records come from; those of a GPU go by way of pinned buffers as large as the largest.
        shared: whether processes take turns with it. The caller sees to it that one writes at a time, and the next
            calls `recover` first. Commits then name scratch records too, of which there is one copy; they survive the
            death of a process and no power cut. Else no other process may have it open, commits survive a power cut,
            and the one before the last stays as well.

    Raises:
        TierError: the folder cannot be used, or another run uses the file.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str = "rank-0",
        lanes: Lanes | None = None,
        direct: bool = True,
        device: torch.device | None = None,
        shared: bool = False,
    ) -> None:
        self.files = TierFile(Path(folder), name, direct, shared)
        self.about: dict[str, Any] = {}
        self._shared = shared
        self._table_changed = False
        self._device = device or torch.device("cpu")
        self._lanes = lanes or Lanes(self._device)
        self._closes_lanes = lanes is None
        # Chunks of a record, several under way at once: each lane has its own, so that neither waits for the other.
        self._pools = {way: ThreadPoolExecutor(_THREADS, f"pipefit-p{way}") for way in ("read", "write")}
        self._records: dict[Key, _Record] = {}
        self._head = {way: mmap.mmap(-1, HEADER_BYTES) for way in self._pools}
        self._pinned: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return max((record.end for record in list(self._records.values())), default=0)

    @property
    def sizes(self) -> dict[Key, int]:
        """Bytes of each record that is committed."""
        return {key: record.num_bytes for key, record in self._records.items() if record.is_committed}

    # ---- room ------------------------------------------------------------------------------------------------------

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """See `TierStore`. The records that an earlier run left in the file are lost."""
        self._place({key: size for key, size in sizes.items() if key not in scratch}, 2)
        self._place({key: size for key, size in sizes.items() if key in scratch}, 1)
        self.files.allocate(self.num_bytes)
        self._write_table()

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """See `TierStore`; the room is at the end of the file."""
        self._place(sizes, 1)
        self.files.extend(self.num_bytes)

    def _place(self, sizes: Mapping[Key, int], copies: int) -> None:
        position = self.num_bytes
        for key, size in sizes.items():
            record = _Record(Room(position, size, copies), copies == 2 or self._shared)
            self._records[key] = record
            position = record.end
        self._table_changed |= self._shared
        self._pin_largest()

    def _pin_largest(self) -> None:
        """Pins buffers as large as the largest record, where the device is a GPU.

        Each lane has one: its thread makes one copy at a time, to the end.
        """
        largest = max((record.num_bytes for record in self._records.values()), default=0)
        if self._device.type != "cuda" or (self._pinned and largest <= self._pinned["write"].numel()):
            return
        for way, lane in (("read", self._lanes.read), ("write", self._lanes.write)):
            lane.submit(lambda: None, 0).wait()
            if way in self._pinned:
                unpin(self._pinned.pop(way))
            buffer = aligned(max(largest, ALIGNMENT))
            try:
                pin(buffer)
            except RuntimeError as problem:
                raise TierError(f"the host has no room to pin {format_bytes(largest)}: {problem}") from None
            self._pinned[way] = buffer

    def _write_table(self) -> None:
        rooms = {key: record.room for key, record in list(self._records.items()) if record.is_committed}
        self.files.write_table(rooms, self.about)
        self._table_changed = False

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        record = self._records[key]
        assert source.numel() == record.num_bytes, f"{key}: {source.numel()} bytes for a record of {record.num_bytes}"
        through = self._pinned["write"][: record.num_bytes] if source.is_cuda else source
        data = memoryview(through.numpy())
        # A computation waits for the slowest of its threads, so a lane that computed checksums meanwhile would delay it
        # by that time on every core. Whoever has computed the data computes them, on all cores.
        known = None if source.is_cuda or after else chunk_sum(data)

        def work() -> None:
            if source.is_cuda:
                through.copy_(source)
            checksum = chunk_sum(data) if known is None else known
            copy = record.next_copy
            self._head["write"][:] = RecordHeader(str(key), version, record.num_bytes, checksum).pack()
            self._move("write", data, record.position(copy))
            record.current, record.version = copy, version

        record.requested = version
        record.written = self._lanes.write.submit(work, record.num_bytes, after)
        return record.written

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`.

        The copy fails with a `TierError` where the record holds another version or does not have its checksum; into
        the host's memory, the checksum is computed by the thread that waits for the copy.
        """
        record = self._records[key]
        through = self._pinned["read"][: record.num_bytes] if into.is_cuda else into[: record.num_bytes]
        data = memoryview(through.numpy())

        found: list[RecordHeader | None] = []

        def work() -> None:
            if record.version != version:
                raise TierError(f"{key}: version {version} is needed, {self.files.path} holds {record.version}")
            found.append(self._load(key, record, record.current, data))
            if into.is_cuda:
                check()
                into[: record.num_bytes].copy_(through)

        def check() -> None:
            header = found[0]
            if header is None or header.version != version or header.checksum != chunk_sum(data):
                raise DamageError(
                    f"{key} in {self.files.path} does not have its checksum: the disk did not keep what was written; "
                    f"{self.files.status()}"
                )

        waits = (*after, *([record.written] if record.written else []))
        copy = self._lanes.read.submit(work, record.num_bytes, waits)
        copy.check = None if into.is_cuda else check
        return copy

    def holds(self, key: Key) -> int | None:
        """See `TierStore`."""
        record = self._records.get(key)
        return None if record is None else record.requested

    # ---- commits ---------------------------------------------------------------------------------------------------

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        after: Sequence[Copy] = (),
        tensors: FileEntry | bytes | None = None,
    ) -> Copy:
        """All records as written so far belong to `step`, with what else is needed to resume from there.

        Only later writes wait for it.

        Args:
            step: weight updates done.
            state: JSON data, given back by `recover`.
            after: the writes since the last commit; if one of them fails, so does the commit.
            tensors: a safetensors file that belongs to the step too, or the bytes of one.
        """

        def work() -> None:
            if self._table_changed:
                self._write_table()
            entry = self.files.write_spare(tensors) if isinstance(tensors, bytes) else tensors
            records = {  # others may get room meanwhile
                key: Written(record.version, record.current)
                for key, record in list(self._records.items())
                if record.is_committed and record.current >= 0
            }
            self.files.commit(Commit(step, dict(state), records, entry))
            for key, written in records.items():
                self._records[key].committed = written.copy

        return self._lanes.write.submit(work, len(tensors) if isinstance(tensors, bytes) else 0, after)

    def recover(self, at_most: int | None = None, check: bool = True) -> Commit:
        """Takes up the last committed step, whatever was being written when the run before was cut off.

        Args:
            at_most: later steps are left out. They are still there for a later call, until something is written.
            check: whether every record of it is read and checked now; where one is damaged, the step before is taken
                if that is whole. Else each is checked when it is read.

        Raises:
            TierError: there is no committed step, or records are damaged.
        """
        commits = self.files.commits()
        if not commits:
            raise TierError(f"{self.files.path.parent}: no step was committed there")
        rooms, self.about = read_table(self.files.path.parent, self.files.path.stem)
        if not self._records or self._shared:
            self._records = {key: _Record(room, True) for key, room in rooms.items()}
            self._pin_largest()
        self.files.check_size(self.num_bytes)
        candidates = [commit for commit in commits if at_most is None or commit.step <= at_most]
        if not candidates:
            first = commits[-1].step
            raise TierError(f"{self.files.path}: step {at_most} is needed, the first that is there is {first}")
        damaged: list[str] = []
        for commit in candidates:
            damaged = [str(key) for key, written in commit.records.items() if not self._restore(key, written, check)]
            try:
                if check and commit.tensors is not None:
                    commit.tensors.check(self.files.path.parent)
            except PipefitError:
                damaged.append("the state of what stayed on the device")
            if not damaged:
                return commit
        raise DamageError(
            f"{damaged[0]} of step {candidates[-1].step} in {self.files.path} does not have its checksum; resume from "
            "a checkpoint"
        )

    def resume_from(self, commit: Commit) -> None:
        """Forgets later commits, which `recover` has left out."""
        self.files.resume_from(commit)

    def _restore(self, key: Key, written: Written, check: bool) -> bool:
        """Makes a committed copy of a record the current one; whether it is whole."""
        record = self._records.get(key)
        if record is None or not 0 <= written.copy < record.room.copies:
            return False
        if check:
            buffer = memoryview(mmap.mmap(-1, record.num_bytes)) if record.num_bytes else memoryview(b"")
            header = self._load(key, record, written.copy, buffer)
            if header is None or header.version != written.version or header.checksum != chunk_sum(buffer):
                return False
        record.restore(written)
        return True

    def close(self, discard: bool = False) -> None:
        """Waits for what is under way and closes the file, which stays, unless it is to be discarded."""
        if self._closes_lanes:
            self._lanes.close()
        for buffer in self._pinned.values():
            unpin(buffer)
        self._pinned.clear()
        for pool in self._pools.values():
            pool.shutdown()
        self.files.close()
        if discard:
            self.files.remove()

    def _load(self, key: Key, record: _Record, copy: int, data: memoryview) -> RecordHeader | None:
        """Reads one copy of a record; its header, None if that is damaged or another record's."""
        self._move("read", data, record.position(copy))
        header = RecordHeader.unpack(self._head["read"][:])
        fits = header is not None and header.name == str(key) and header.num_bytes == record.num_bytes
        return header if fits else None

    def _move(self, way: str, data: memoryview, start: int) -> None:
        """Reads or writes a header and its payload, in pieces, several of them at once."""
        move = getattr(self.files, way)
        pieces = [(memoryview(self._head[way]), start)]
        for offset in range(0, len(data), _CHUNK_BYTES):
            pieces.append((data[offset : offset + _CHUNK_BYTES], start + HEADER_BYTES + offset))
        for _ in (self._pools[way].map if self._lanes.threaded else map)(lambda piece: move(*piece), pieces):
            pass
