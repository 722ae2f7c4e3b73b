"""The disk tier: one preallocated file, read and written past the page cache where the file system allows it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import TierError
from pipefit.spill.arena import aligned, pin, unpin
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.records import HEADER_BYTES, RecordHeader, chunk_sum
from pipefit.spill.tier_file import Aside, Committed, TierFile
from pipefit.spill.tiers import ALIGNMENT, Key
from pipefit.units import format_bytes

__all__ = ["DiskTier"]

_CHUNK_BYTES = 16 << 20
_THREADS = 2


@dataclass
class _Record:
    """Where a record lies.

    Attributes:
        start: of its first copy in the file.
        num_bytes: of its payload.
        current: which copy holds what was written last; −1: none.
        kept: which copy belongs to the last committed step, and is not written; −1: none.
        version: of that copy.
        asked: the version that was last given to write.
        written: its last write.
    """

    start: int
    num_bytes: int
    copies: int
    current: int = -1
    kept: int = -1
    version: int = -1
    asked: int | None = None
    written: Copy | None = None

    def position(self, copy: int) -> int:
        return self.start + copy * (HEADER_BYTES + self.num_bytes)

    @property
    def end(self) -> int:
        return self.position(self.copies)


class DiskTier:
    """Records in a file, each with version and checksum, twice.

    A run that is cut off goes on from `recover`: the records of the last committed step are whole, because whatever
    is written after it goes to the other copy of each.

    Attributes:
        about: JSON data that tells what the records are of; set it before `reserve`, read it after `recover`.

    Args:
        folder: for the file; made if its parent exists.
        name: of the file, without ending; one for each rank and trial.
        lanes: shared with other stores; None: its own.
        direct: whether to read and write past the page cache; where the file system refuses that, it is not done.
        device: whose memory the records come from; those of a GPU go by way of pinned buffers as large as the largest.

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
    ) -> None:
        self._file = TierFile(Path(folder), name, direct)
        self.about: dict[str, Any] = {}
        self._device = device or torch.device("cpu")
        self._lanes = lanes or Lanes(self._device)
        self._own_lanes = lanes is None
        # Chunks of a record, several under way at once: each lane has its own, so that neither waits for the other.
        self._readers, self._writers = (ThreadPoolExecutor(_THREADS, f"pipefit-{what}") for what in ("pread", "pwrite"))
        self._records: dict[Key, _Record] = {}
        self._head = {"read": mmap.mmap(-1, HEADER_BYTES), "write": mmap.mmap(-1, HEADER_BYTES)}
        self._pinned: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return max((record.end for record in self._records.values()), default=0)

    @property
    def sizes(self) -> dict[Key, int]:
        """Bytes of each record that outlasts the run."""
        return {key: record.num_bytes for key, record in self._records.items() if record.copies == 2}

    @property
    def is_direct(self) -> bool:
        """Whether it goes past the page cache."""
        return self._file.is_direct

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """See `TierStore`. What an earlier run left in the file is forgotten."""
        self._place({key: size for key, size in sizes.items() if key not in scratch}, 2)
        self._place({key: size for key, size in sizes.items() if key in scratch}, 1)
        self._file.allocate(self.num_bytes)
        self._file.write_table([[*key, size] for key, size in self.sizes.items()], self.about)

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """See `TierStore`; the room is behind what the file has."""
        self._place(sizes, 1)
        self._file.extend(self.num_bytes)

    def _place(self, sizes: Mapping[Key, int], copies: int) -> None:
        position = self.num_bytes
        for key, size in sizes.items():
            record = self._records[key] = _Record(position, size, copies)
            position = record.end
        if self._device.type == "cuda":
            largest = max((record.num_bytes for record in self._records.values()), default=0)
            if not self._pinned or largest > min(buffer.numel() for buffer in self._pinned.values()):
                for lane in (self._lanes.read, self._lanes.write):
                    lane.submit(lambda: None, 0).wait()
                self._pin(largest)

    def _pin(self, num_bytes: int) -> None:
        """Sees to pinned buffers of that size. Each lane has one: its thread makes one copy at a time, to the end."""
        for lane in ("read", "write"):
            if lane in self._pinned:
                unpin(self._pinned.pop(lane))
            buffer = aligned(max(num_bytes, ALIGNMENT))
            try:
                pin(buffer)
            except RuntimeError as problem:
                raise TierError(f"the host has no room to pin {format_bytes(num_bytes)}: {problem}") from None
            self._pinned[lane] = buffer

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        record = self._records[key]
        assert source.numel() == record.num_bytes, f"{key}: {source.numel()} bytes for a record of {record.num_bytes}"
        through = self._pinned["write"][: record.num_bytes] if source.is_cuda else source
        data = memoryview(through.numpy())
        # A computation waits for the slowest of its threads, so a lane that took checksums beside it would cost it that
        # time on every core. Whoever has computed the data takes them, on all cores.
        known = None if source.is_cuda or after else chunk_sum(data)

        def work() -> None:
            if source.is_cuda:
                through.copy_(source)
            checksum = chunk_sum(data) if known is None else known
            copy = 1 - record.kept if record.kept >= 0 else 0
            self._head["write"][:] = RecordHeader(str(key), version, record.num_bytes, checksum).pack()
            self._move(self._writers, self._file.write, self._head["write"], data, record.position(copy))
            record.current, record.version = copy, version

        record.asked = version
        record.written = self._lanes.write.submit(work, record.num_bytes, after)
        return record.written

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`.

        The copy fails with a `TierError` where the record holds another version or does not fit its checksum; into
        the host's memory, the checksum is taken by the thread that waits for the copy.
        """
        record = self._records[key]
        through = self._pinned["read"][: record.num_bytes] if into.is_cuda else into[: record.num_bytes]
        data = memoryview(through.numpy())

        found: list[RecordHeader | None] = []

        def work() -> None:
            if record.version != version:
                raise TierError(f"{key}: asked for version {version}, {self._file.path} holds {record.version}")
            found.append(self._load(key, record, record.current, data))
            if into.is_cuda:
                check()
                into[: record.num_bytes].copy_(through)

        def check() -> None:
            header = found[0]
            if header is None or header.version != version or header.checksum != chunk_sum(data):
                raise TierError(
                    f"{key} in {self._file.path} does not fit its checksum: the disk did not keep what was written; "
                    f"{self._file.cure()}"
                )

        waits = (*after, *([record.written] if record.written else []))
        copy = self._lanes.read.submit(work, record.num_bytes, waits)
        return copy if into.is_cuda else copy.checked_by(check)

    def holds(self, key: Key) -> int | None:
        """See `TierStore`."""
        return self._records[key].asked

    def commit(
        self, step: int, version: int, state: bytes, after: Sequence[Copy] = (), aside: Aside | None = None
    ) -> Copy:
        """See `TierStore`. Nothing waits for it but what is written later."""

        def work() -> None:
            self._file.commit(step, version, state, aside)
            for record in list(self._records.values()):  # others may get room meanwhile
                record.kept = record.current if record.copies == 2 else -1

        return self._lanes.write.submit(work, len(state), after)

    def spare(self) -> Path:
        """Where a file can be put that belongs to the next step to be committed."""
        return self._file.spare()

    def cure(self) -> str:
        """What is left to go on from."""
        return self._file.cure()

    def recover(self, at_most: int | None = None) -> Committed:
        """Goes back to the last committed step, whatever was being written when the run before was cut off.

        Every record of it is read and checked. Where one is damaged, the step before is taken if that is whole.

        Args:
            at_most: a later step is passed over. It is still there for a later call, until something is written.

        Raises:
            TierError: there is no committed step, or records are damaged.
        """
        commits = self._file.commits()
        if not commits:
            raise TierError(f"{self._file.path.parent}: no step was committed there")
        rows, self.about = self._file.table()
        if not self._records:
            self._place({Key(stage, kind, mb): size for stage, kind, mb, size in rows}, 2)
        self._file.check_size(self.num_bytes)
        wanted = [committed for committed in commits if at_most is None or committed.step <= at_most]
        if not wanted:
            first = commits[-1].step
            raise TierError(f"{self._file.path}: step {at_most} is asked for, the first that is there is {first}")
        damaged: list[str] = []
        for committed in wanted:
            version = committed.version
            damaged = [str(key) for key, record in self._records.items() if not self._finds(key, record, version)]
            if not self._file.fits(committed):
                damaged.append("what stayed on the device")
            if not damaged:
                return committed
        raise TierError(
            f"{damaged[0]} of step {wanted[-1].step} in {self._file.path} does not fit its checksum; go on from a "
            "checkpoint"
        )

    def goes_on_from(self, committed: Committed) -> None:
        """What was committed after a step, and passed over by `recover`, is forgotten."""
        self._file.goes_on_from(committed)

    def _finds(self, key: Key, record: _Record, version: int) -> bool:
        """Whether there is a whole copy of a version, which then counts."""
        if record.copies == 1:
            return True
        buffer = memoryview(mmap.mmap(-1, record.num_bytes)) if record.num_bytes else memoryview(b"")
        for copy in range(record.copies):
            header = self._load(key, record, copy, buffer)
            if header is not None and header.version == version and header.checksum == chunk_sum(buffer):
                record.current = record.kept = copy
                record.version = record.asked = version
                return True
        return False

    def close(self) -> None:
        """Waits for what is under way and closes the file, which stays."""
        if self._own_lanes:
            self._lanes.close()
        for buffer in self._pinned.values():
            unpin(buffer)
        self._pinned.clear()
        self._readers.shutdown()
        self._writers.shutdown()
        self._file.close()

    def discard(self) -> None:
        """Closes the file and removes it: the run has ended well, and what it leaves is a checkpoint."""
        self.close()
        self._file.remove()

    def _load(self, key: Key, record: _Record, copy: int, data: memoryview) -> RecordHeader | None:
        """Reads one copy of a record; its header, None if that is not whole, or another record's."""
        self._move(self._readers, self._file.read, self._head["read"], data, record.position(copy))
        header = RecordHeader.unpack(self._head["read"][:])
        fits = header is not None and header.name == str(key) and header.num_bytes == record.num_bytes
        return header if fits else None

    def _move(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[memoryview, int], None],
        head: mmap.mmap,
        data: memoryview,
        start: int,
    ) -> None:
        """Moves a header and its payload, in pieces, several of them at once."""
        pieces = [(memoryview(head), start)]
        for offset in range(0, len(data), _CHUNK_BYTES):
            pieces.append((data[offset : offset + _CHUNK_BYTES], start + HEADER_BYTES + offset))
        for _ in pool.map(lambda piece: move(*piece), pieces):
            pass
