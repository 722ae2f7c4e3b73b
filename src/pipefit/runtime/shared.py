"""Messages between the ranks of one machine, through memory that both ends map: two copies and one system call each.

    sender    copies the tensor into its ring, writes a record (who, where, how much) to the receiver's inbox, goes on
    receiver  blocks on its inbox; copies out what a record names, into the buffer posted for it or aside, counts it

No thread stands between the ranks, which on few cores would fight the computing ones for them. A rank that must wait,
for a message or for room in a ring, serves its whole inbox meanwhile, so that any order of waiting that works when
sends block until they are received works here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipefit.errors import CommunicationError
from pipefit.runtime.launch import rings_of

__all__ = ["SMALL_BYTES", "SharedLinks"]

# Sender, generation of its ring, tag, offset in the ring, bytes.
_RECORD = struct.Struct("<iiqqq")
_READ = 128 * _RECORD.size
_COUNT = struct.Struct("<q")
_HEAD = _ALIGN = 64
_SLOTS, _LEAST_RING = 8, 1 << 20
_NAP_S = 5e-5
# Of the parts of sums: messages of programs have tags from 0.
_SUM = -1

SMALL_BYTES = 1 << 16
"""Sums of at most so many bytes are quicker by a message to each than through the process group."""


class SharedLinks:
    """This rank's messages to and from the others of its machine.

    Args:
        folder: private folder of the run.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder
        self._memory, self._name = rings_of(folder)
        self._path = _inbox(folder, rank)
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path, 0o600)
        # Open for writing too, so that it has no end when a sender leaves: the launcher tells of that.
        self._inbox = os.open(self._path, os.O_RDWR)
        self._peers: dict[int, int] = {}
        self._out: dict[int, _OutRing] = {}
        self._in: dict[int, _InRing] = {}
        self._posted: dict[tuple[int, int], deque[_Arrival]] = {}
        self._early: dict[tuple[int, int], deque[Tensor]] = {}

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Copies a contiguous tensor to a peer; it may be changed or let go of at once.

        Waits only when the peer is many messages behind.
        """
        (tensor,) = tensors
        size = tensor.nbytes
        ring = self._out.get(peer)
        if ring is None or size > ring.largest:
            ring = self._out[peer] = self._new_ring(peer, size, ring.generation + 1 if ring else 0)
        while (offset := ring.room_for(size)) is None:
            if not self._serve(block=False):
                time.sleep(_NAP_S)
        ctypes.memmove(ring.address + offset, tensor.data_ptr(), size)
        os.write(self._peers[peer], _RECORD.pack(self.rank, ring.generation, tag, offset, size))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Arrival:
        """Takes the next message of a peer with this tag into a contiguous tensor; `wait` of what it gives waits."""
        (buffer,) = tensors
        arrival = _Arrival(self, buffer)
        early = self._early.get((peer, tag))
        if early:
            kept = early.popleft()
            arrival.take(kept.data_ptr(), kept.nbytes)
        else:
            self._posted.setdefault((peer, tag), deque()).append(arrival)
        return arrival

    def all_reduce(self, tensor: Tensor, members: Sequence[int]) -> _Sum:
        """Sums a small contiguous tensor over some ranks, in place, once `wait` of what it gives has returned.

        Every member sends its own to every other: for a few numbers nothing is quicker. The sum is taken in the order
        of the members, so it is the same to the bit on all of them.
        """
        others = [member for member in members if member != self.rank]
        for member in others:
            self.send([tensor], member, _SUM)
        parts = {member: torch.empty_like(tensor) for member in others}
        arrivals = [self.recv([parts[member]], member, _SUM) for member in others]
        return _Sum(tensor, [parts.get(member) for member in members], arrivals)

    def serve(self) -> None:
        """Waits for a message, and takes in all that are there."""
        self._serve(block=True)

    def close(self) -> None:
        """Sends and receives no more."""
        for handle in (self._inbox, *self._peers.values()):
            os.close(handle)
        self._path.unlink(missing_ok=True)
        self._peers.clear()
        self._out.clear()
        self._in.clear()

    def _serve(self, block: bool) -> bool:
        if not block:
            os.set_blocking(self._inbox, False)
        try:
            records = os.read(self._inbox, _READ)
        except BlockingIOError:
            return False
        finally:
            if not block:
                os.set_blocking(self._inbox, True)
        for record in _RECORD.iter_unpack(records):
            self._take(*record)
        return True

    def _take(self, source: int, generation: int, tag: int, offset: int, size: int) -> None:
        ring = self._in.get(source)
        if ring is None or ring.generation != generation:
            ring = self._in[source] = _InRing(self._ring_file(source, self.rank, generation), generation)
        posted = self._posted.get((source, tag))
        if posted:
            posted.popleft().take(ring.address + offset, size)
        else:
            kept = torch.empty(size, dtype=torch.uint8)
            ctypes.memmove(kept.data_ptr(), ring.address + offset, size)
            self._early.setdefault((source, tag), deque()).append(kept)
        ring.count()

    def _new_ring(self, peer: int, size: int, generation: int) -> _OutRing:
        if peer not in self._peers:
            self._peers[peer] = os.open(_inbox(self._folder, peer), os.O_WRONLY)
        capacity = max(_LEAST_RING, (_SLOTS if size <= _LEAST_RING else _SLOTS // 2) * _aligned(size))
        return _OutRing(self._places(self.rank, peer, generation), capacity, generation)

    def _places(self, source: int, target: int, generation: int) -> list[Path]:
        """Where a ring's file may be: in memory, or where that has no room, in the folder of the run."""
        name = f"{self._name}-{source}-{target}-{generation}.ring"
        return [self._memory / name, self._folder / name]

    def _ring_file(self, source: int, target: int, generation: int) -> Path:
        return next(path for path in self._places(source, target, generation) if path.exists())


class _Arrival:
    """A message that will come into a buffer."""

    __slots__ = ("_buffer", "_links")

    def __init__(self, links: SharedLinks, buffer: Tensor) -> None:
        self._links = links
        self._buffer: Tensor | None = buffer

    def take(self, address: int, size: int) -> None:
        buffer = self._buffer
        assert buffer is not None
        if size != buffer.nbytes:
            raise CommunicationError(f"a message has {size} bytes, its receiver expected {buffer.nbytes}")
        ctypes.memmove(buffer.data_ptr(), address, size)
        self._buffer = None

    def wait(self) -> None:
        """Returns once the message is there."""
        while self._buffer is not None:
            self._links.serve()


class _Sum:
    """A sum under way; None stands for this rank's own part."""

    def __init__(self, tensor: Tensor, parts: list[Tensor | None], arrivals: list[_Arrival]) -> None:
        self._tensor, self._parts, self._arrivals = tensor, parts, arrivals

    def wait(self) -> None:
        """Returns once the sum is in the tensor."""
        for arrival in self._arrivals:
            arrival.wait()
        if self._arrivals:
            whole = [self._tensor if part is None else part for part in self._parts]
            self._tensor.copy_(functools.reduce(torch.add, whole))
            self._arrivals = []


class _OutRing:
    """The sender's end of a ring: what it has given and the receiver has not counted yet."""

    def __init__(self, places: list[Path], capacity: int, generation: int) -> None:
        self.generation = generation
        self.largest = capacity // 2
        self._capacity = capacity
        self._head = 0
        self._given: deque[int] = deque()
        self._counted = 0
        self._memory = _reserve(places, _HEAD + capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _HEAD

    def room_for(self, size: int) -> int | None:
        """Takes room at the returned offset; None: the receiver must count more first."""
        (counted,) = _COUNT.unpack_from(self._memory)
        given = self._given
        while self._counted < counted:
            given.popleft()
            self._counted += 1
        size = _aligned(size)
        offset = self._head if given else 0
        if given and offset <= given[0]:
            # Wrapped: the oldest lies ahead. An equal offset is a full ring.
            if offset + size > given[0]:
                return None
        elif offset + size > self._capacity:
            offset = 0
            if size > given[0]:
                return None
        given.append(offset)
        self._head = offset + size
        return offset


class _InRing:
    """The receiver's end; the file's name goes, both ends have it open."""

    def __init__(self, path: Path, generation: int) -> None:
        self.generation = generation
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        path.unlink()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _HEAD
        self._count = 0

    def count(self) -> None:
        """One message more has been taken out."""
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)


def _inbox(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.inbox"


def _aligned(size: int) -> int:
    return max(-(-size // _ALIGN) * _ALIGN, _ALIGN)


def _reserve(places: list[Path], size: int) -> mmap.mmap:
    """Memory in a file whose room is taken now: a page that is missing later would end the process."""
    problem: OSError | None = None
    for path in places:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as refused:
            problem = refused
            continue
        try:
            os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        except OSError as full:
            problem = full
            with contextlib.suppress(OSError):
                path.unlink()
        finally:
            os.close(handle)
    raise CommunicationError(
        f"no room for a message buffer of {size} bytes in {' or '.join(str(path.parent) for path in places)}: "
        f"{problem}; free some, or set PIPEFIT_LINKS=gloo"
    )
