"""The store of records: in the host's memory, in a file on disk, or partly in each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipefit.errors import DamageError, TierError
from pipefit.spill.arena import aligned
from pipefit.spill.lanes import Copy, Lane, Lanes, Work
from pipefit.spill.tier_file import Commit, TierFile, Written
from pipefit.spill.tiers import ALIGNMENT, OPTIM, WEIGHTS, WGRAD, Key
from pipefit.stage.accelerator import CPU, is_accelerator, pin, unpin
from pipefit.units import format_bytes

Sizes = dict[Key, int]
"""Bytes of each record."""

# Weights are read twice in a step, the others once.
_FIRST_IN_MEMORY = {WEIGHTS: 0, WGRAD: 1, OPTIM: 2}


@dataclass
class _Record:
    """A record and its place.

    Attributes:
        disk: its place and version in the file; without a copy where it is in memory only.
        is_committed: whether commits name it.
        memory: its place in the host's memory; None: it is on disk.
        version: that can be read; −1: none.
        requested: the version that `write` was called with last; None: none.
        written: the last write.
        committed: the copy that the last commit names, which is not overwritten; −1: none.
    """

    disk: Written
    is_committed: bool
    memory: Tensor | None
    version: int = -1
    requested: int | None = None
    written: Copy | None = None
    committed: int = -1

    @property
    def next_copy(self) -> int:
        """The copy to write."""
        if self.disk.copies == 2 and self.committed >= 0:
            return 1 - self.committed
        return 0


class TierStore:
    """Records of a tier. All sizes are multiples of `ALIGNMENT`; sources and targets are aligned flat uint8 tensors.

    Where there is a folder, all records are in its file except those that fit into `host_bytes`, weights first. Each
    has a version and a checksum, and those that are committed have two copies: an interrupted run resumes by `recover`,
    since later writes use the other copy of each. The host's memory does not outlive the process, so a commit copies
    its records to the disk.

    Attributes:
        files: of the disk tier; None: all records are in the host's memory.
        lanes: that copy.

    Args:
        folder: for the file, made if its parent exists; None: no disk.
        name: of the file, without suffix; one for each rank or trial.
        lanes: that copy; None: those of the device.
        device: of the records' sources and targets; to and from disk, those of a GPU pass through pinned buffers as
            large as the largest record.
        shared: whether several processes use it. The caller must ensure that one writes at a time, and that the next
            calls `recover` first. Commits then name scratch records too, of which there is one copy; they survive the
            death of a process, but not a power cut. Else no other process may have it open, commits survive a power
            cut, and the one before the last stays as well.
        host_bytes: limit on the records in the host's memory; None: no limit, or with a folder no records there.
        run: name of a new run, the same for all its ranks; "": a name of its own.

    Raises:
        TierError: the folder cannot be used, or another run uses the file.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        name: str = "rank-0",
        lanes: Lanes | None = None,
        device: torch.device = CPU,
        shared: bool = False,
        host_bytes: float | None = None,
        run: str = "",
    ) -> None:
        if folder is None:
            self.files = None
        else:
            self.files = TierFile(Path(folder), name, shared, run)
        self._shared, self._host_bytes = shared, host_bytes
        self._device = device
        self.lanes = lanes or Lanes(self._device)
        self._records: dict[Key, _Record] = {}
        self._pinned: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes of the host's memory that it uses."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return max((record.disk.end for record in list(self._records.values())), default=0)

    @property
    def sizes(self) -> Sizes:
        """Bytes of each record that is committed."""
        return {key: record.disk.num_bytes for key, record in self._records.items() if record.is_committed}

    # ---- room ------------------------------------------------------------------------------------------------------

    def reserve(self, sizes: Sizes, scratch: Collection[Key] = (), about: Mapping[str, Any] | None = None) -> None:
        """Reserves space for all records at once, before the first is written; those of an earlier run are lost.

        Args:
            sizes: bytes of each.
            scratch: records that no commit names: they exist only within a step, or the run cannot be resumed.
            about: JSON data that identifies the records for a resumed run; None: not needed.

        Raises:
            TierError: there is not enough room.
        """
        self._place(sizes, scratch)
        if self.files is not None:
            self.files.allocate(self.disk_bytes, about)

    def reserve_more(self, sizes: Sizes, is_scratch: bool = True) -> None:
        """Reserves space for further records; a key's former record is dropped, unless a commit names it.

        Raises:
            TierError: there is not enough room.
        """
        self._place(sizes, sizes if is_scratch else ())
        if self.files is not None:
            self.files.extend(self.disk_bytes)

    def _place(self, sizes: Sizes, scratch: Collection[Key]) -> None:
        memory = self._memory(sizes)
        position = self.disk_bytes
        for key, size in sizes.items():
            is_kept = key not in scratch
            copies = 1 + is_kept
            if self.files is None or (key in memory and not is_kept):
                copies = 0
            written = Written(position, size, copies)
            self._records[key] = _Record(written, self._shared or is_kept, memory.get(key))
            position = written.end
        self._pin_largest()

    def _memory(self, sizes: Sizes) -> dict[Key, Tensor]:
        """Host memory for the records that belong there."""
        held, total = dict(sizes), sum(sizes.values())
        if self.files is not None:
            held, total = {}, 0
            for key in sorted(sizes, key=lambda key: _FIRST_IN_MEMORY.get(key.kind, 3)):
                if self._host_bytes and self.memory_bytes + total + sizes[key] <= self._host_bytes:
                    held[key] = sizes[key]
                    total += sizes[key]
        elif self._host_bytes is not None and (wanted := self.memory_bytes + total) > self._host_bytes:
            raise TierError(
                f"the host tier needs {format_bytes(wanted)} for spilled records, --host-memory allows "
                f"{format_bytes(self._host_bytes)}; allow more, or give --disk as well"
            )
        if not held:
            return {}
        self._buffers.append(self._pinned_buffer(total))
        return dict(zip(held, self._buffers[-1].split(list(held.values())), strict=True))

    def _pinned_buffer(self, num_bytes: int) -> Tensor:
        """Memory of the host, pinned where the device is a GPU."""
        try:
            buffer = aligned(num_bytes)
            if is_accelerator(self._device) and num_bytes:
                pin(buffer)
        except RuntimeError as problem:
            raise TierError(
                f"the host has no room for {format_bytes(num_bytes)} of spilled records: {problem}"
            ) from None
        return buffer

    def _pin_largest(self) -> None:
        """Pins buffers as large as the largest record on disk, where the device is a GPU.

        Each lane has one: its thread makes one copy at a time.
        """
        if self.files is None or not is_accelerator(self._device):
            return
        largest = max((r.disk.num_bytes for r in self._records.values() if r.memory is None), default=0)
        if self._pinned and largest <= self._pinned["write"].numel():
            return
        for way, lane in (("read", self.lanes.read), ("write", self.lanes.write)):
            lane.submit(lambda: None).wait()
            if way in self._pinned:
                unpin(self._pinned.pop(way))
            self._pinned[way] = self._pinned_buffer(max(largest, ALIGNMENT))

    # ---- copies ----------------------------------------------------------------------------------------------------

    def holds(self, key: Key) -> int | None:
        """The version of a record that was written last (or is being written); None: none yet."""
        record = self._records.get(key)
        if record is None:
            return None
        return record.requested

    def write(self, key: Key, version: int, source: Tensor) -> Copy:
        """Starts to write a version; it may be read once the copy has ended."""
        record = self._records[key]
        assert source.numel() == record.disk.num_bytes, f"{key}: {source.numel()} bytes, {record.disk.num_bytes} fit"
        memory = record.memory

        def copy() -> None:
            assert memory is not None
            _copy(source, memory)
            record.version = version

        if memory is None:
            work = self._saving(key, version, source)
        else:
            work = copy
        return self._start(self.lanes.write, record, version, work)

    def _start(self, lane: Lane, record: _Record, version: int, work: Work, after: Sequence[Copy] = ()) -> Copy:
        """Starts the work that makes a version of a record."""
        record.requested = version
        record.written = lane.submit(work, after)
        return record.written

    def _saving(self, key: Key, version: int, source: Tensor) -> Work:
        """The work of writing a version of a record into the file."""
        record, files = self._records[key], self.files
        assert files is not None
        if is_accelerator(source.device):
            through = self._pinned["write"][: record.disk.num_bytes]
        else:
            through = source
        data = through.numpy().data
        # A computation waits for the slowest of its threads, so a lane that computed checksums meanwhile would delay it
        # by that time on every core. So the thread that has computed the data computes them, on all cores.
        checksum = 0
        if not is_accelerator(source.device):
            checksum = files.checksum(data, key, version)

        def work() -> None:
            nonlocal checksum
            if is_accelerator(source.device):
                through.copy_(source)
                checksum = files.checksum(data, key, version)
            copy = record.next_copy
            files.write(data, record.disk.position(copy))
            record.disk = record.disk._replace(version=version, copy=copy, checksum=checksum)
            record.version = version

        return work

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Starts to read a version, after its write and after all of `after`.

        The copy fails with a `TierError` where the record holds another version or does not have its checksum; from
        disk into the host's memory, the checksum is computed by the thread that waits for the copy.
        """
        record, disk = self._records[key], self.files
        if is_accelerator(into.device) and record.memory is None:
            through = self._pinned["read"]
        else:
            through = into
        through = through[: record.disk.num_bytes]
        found = Written(0, 0, 0)

        def work() -> None:
            nonlocal found
            if record.version != version:
                raise TierError(f"{key}: version {version} is needed, the tier holds {record.version}")
            if record.memory is not None:
                _copy(record.memory, into)
                return
            found = record.disk
            assert disk is not None
            disk.read(through.numpy().data, found.position(found.copy))
            if is_accelerator(into.device):
                check()
                into.copy_(through)

        def check() -> None:
            assert disk is not None
            if found.checksum != disk.checksum(through.numpy().data, key, version):
                raise DamageError(
                    f"{key} in {disk.path} does not have its checksum: the disk has damaged it; {disk.status()}"
                )

        waits = list(after)
        if record.written is not None:
            waits.append(record.written)
        copy = self.lanes.read.submit(work, waits)
        if record.memory is None and not is_accelerator(into.device):
            copy.check = check
        return copy

    # ---- steps on the host -----------------------------------------------------------------------------------------

    def record(self, key: Key) -> Tensor:
        """The bytes of a record in the host's memory, without a copy."""
        memory = self._records[key].memory
        assert memory is not None, f"{key} is not in the host's memory"
        return memory

    def step(self, stage: int, version: int, work: Work, after: Sequence[Copy] = ()) -> Copy:
        """Starts a step on the records of a stage, once its gradients are written; it makes `version` of them."""
        weights = self._records[Key(stage, WEIGHTS)]
        gradients = self._records.get(Key(stage, WGRAD))
        waits = list(after)
        for record in (weights, gradients):
            if record is not None and record.written is not None:
                waits.append(record.written)

        def step() -> None:
            work()
            weights.version = version

        return self._start(self.lanes.host, weights, version, step, waits)

    # ---- commits ---------------------------------------------------------------------------------------------------

    def commit(self, step: int, state: Mapping[str, Any], after: Sequence[Copy] = ()) -> Copy:
        """Commits all records written so far as `step`, with the other state that is needed to resume.

        Only later writes wait for it.

        Args:
            step: weight updates done.
            state: JSON data, given back by `recover`.
            after: the writes since the last commit; if one of them fails, so does the commit.
        """
        files, copies = self.files, []
        assert files is not None
        for key, record in self._records.items():
            if record.memory is not None and record.disk.copies and record.written is not None:
                record.written.wait()
                # Later writes to the host's memory wait for this copy of it: the lane keeps the order.
                save = self._saving(key, record.version, record.memory)
                copies.append(self.lanes.write.submit(save))

        def work() -> None:
            # Other records may get space meanwhile.
            named = {key: record for key, record in list(self._records.items()) if record.is_committed}
            files.commit(Commit(step, dict(state), {key: record.disk for key, record in named.items()}))
            for record in named.values():
                record.committed = record.disk.copy

        return self.lanes.write.submit(work, (*after, *copies))

    def recover(self, at_most: int | None = None, check: bool = True) -> Commit:
        """Restores the last committed step; writes that were in progress when the earlier run ended are ignored.

        Args:
            at_most: later steps are skipped. They are still there for a later call, until something is written.
            check: whether every record of it is read and checked now; where one is damaged, the previous step is used
                if it is whole. Else each record is checked when it is read.

        Raises:
            TierError: there is no committed step, or records are damaged.
        """
        assert self.files is not None
        path, commits = self.files.path, self.files.commits()
        candidates = [commit for commit in commits if at_most is None or commit.step <= at_most]
        if not candidates:
            raise TierError(f"{path}: step {at_most} is needed, the first one there is {commits[-1].step}")
        damaged = None
        for commit in candidates:
            named = commit.records if check else ()
            damaged = next((key for key in named if not self.files.is_whole(commit, key)), None)
            if damaged is None:
                break
        else:
            raise DamageError(
                f"{damaged} of step {commit.step} in {path} does not have its checksum; resume from a checkpoint"
            )
        self.files.tier = commit.tier
        memory = {key: record.memory for key, record in self._records.items()}
        memory |= self._memory({key: at.num_bytes for key, at in commit.records.items() if key not in memory})
        records = {key: record for key, record in self._records.items() if not record.is_committed}
        for key, at in commit.records.items():
            records[key] = _Record(at, True, memory.get(key), at.version, at.requested, committed=at.copy)
        self._records = records
        self._pin_largest()
        return commit

    def resume_from(self, commit: Commit) -> None:
        """Removes later commits, which `recover` has skipped; records that belong in memory are read into it."""
        assert self.files is not None
        self.files.resume_from(commit)
        for key, at in commit.records.items():
            if (memory := self._records[key].memory) is not None and at.copy >= 0:
                self.files.read(memory.numpy().data, at.position(at.copy))

    def close(self, discard: bool = False) -> None:
        """Waits for running copies and frees the memory; files stay, unless `discard` is set."""
        self.lanes.close()
        for buffer in (*self._pinned.values(), *self._buffers):
            if is_accelerator(self._device) and buffer.numel():
                unpin(buffer)
        self._pinned.clear()
        self._buffers.clear()
        self._records.clear()
        if self.files is not None:
            self.files.close(discard)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies with numpy on the host, because torch would use the computing threads; with a GPU asynchronously."""
    if source.device.type == "cpu" and target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
