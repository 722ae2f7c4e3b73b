"""The position of each rank: a few numbers in a small shared file, so that a dead rank's last instruction is known."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("qqqqdqqqq")
_NUMBER = struct.Struct("q")

# Places of a rank outside of the instructions of a program.
OUTSIDE = -1
SAVING = -2
LOSS = -3
MEETING = -4
TOKEN = -5
JOINING = -6
MEASURING = -7
LEAVING = -8
PLACES = {
    OUTSIDE: "between two passes, in the code of the user",
    SAVING: "saving or loading a checkpoint",
    LOSS: "waiting for the loss of the step",
    MEETING: "making process groups with the others",
    TOKEN: "waiting for the next token",
    JOINING: "joining the run",
    MEASURING: "measuring layers or links",
    LEAVING: "leaving the run",
}

LEAVE = "leaving the run"
TOGETHER = "a save or something else that all do together"
CALLS = (
    "",
    LEAVE,
    "Pipeline()",
    "Pipeline.step()",
    "Pipeline.fit()",
    "Pipeline.evaluate()",
    "Pipeline.generate()",
    "Pipeline.state_dict()",
    "Pipeline.load_state_dict()",
    "Pipeline.save()",
    "Pipeline.save_pretrained()",
    "Pipeline.load()",
    "Pipeline.timeline()",
    "Pipeline.report()",
    "Pipeline.close()",
    TOGETHER,
)
"""Names of what all ranks do together and begin with a roll call; the first one: nothing."""


class Position(NamedTuple):
    """The position of a rank in its run.

    Attributes:
        passes: number of passes begun.
        index: in the program's list, or one of the places outside it (negative).
        program: number of the program, in the order in which programs were first run.
        pid: the id of the rank's process.
        since_s: time of its arrival there (monotonic seconds of its machine).
        waits: whether it waits for others there: for what its instruction needs, or outside of programs for all.
        calls: number of roll calls that it has begun.
        call: number in `CALLS` of the roll call in which it waits; 0: it waits in none.
        device: the instruction before which its GPU stands, where the host has launched more; −1: none.
    """

    passes: int
    index: int  # type: ignore[assignment]  # a tuple's method has this name
    program: int
    pid: int
    since_s: float
    waits: bool = False
    calls: int = 0
    call: int = 0
    device: int = -1

    @property
    def of_device(self) -> Position:
        """The position at which its GPU waits for others, where the host has launched more; else its own."""
        if self.device < 0:
            return self
        return self._replace(index=self.device, waits=True)


class Progress:
    """One rank's position, written by the rank and readable by others after its death."""

    def __init__(self, path: Path | None = None) -> None:
        self.passes = 0
        self.program = 0
        self.calls = self.call = 0
        self._pid = os.getpid()
        self._memory: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
        if path is not None:
            self.follow(path)
        self.at(OUTSIDE)

    def follow(self, path: Path) -> None:
        """Writes the position to a new file from now on; roll calls are counted anew."""
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.calls = 0

    def at(self, index: int, waits: bool = False) -> None:
        """Records that the rank begins the instruction at `index`, or is at a place outside the program."""
        now, calls = time.monotonic(), (self.calls, self.call)
        _LAYOUT.pack_into(self._memory, 0, self.passes, index, self.program, self._pid, now, waits, *calls, -1)

    def device_at(self, index: int) -> None:
        """Records the instruction before which the GPU stands, until the host moves on; −1: it has done them all."""
        _NUMBER.pack_into(self._memory, _LAYOUT.size - _NUMBER.size, index)

    def again(self) -> None:
        """Records that the rank is still at work where it is."""
        self.at(self.position.index)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The context of a wait for all others, at a place outside of programs."""
        index = self.position.index
        self.at(index, waits=True)
        try:
            yield
        finally:
            self.at(index)

    @contextlib.contextmanager
    def calling(self, call: int) -> Iterator[None]:
        """The context of a roll call under a number in `CALLS`."""
        self.calls, self.call = self.calls + 1, call
        try:
            with self.waiting():
                yield
        finally:
            self.call = 0
            self.again()

    @property
    def position(self) -> Position:
        """The rank's position."""
        return _read(bytes(self._memory))


def _read(data: bytes) -> Position:
    passes, index, program, pid, since_s, waits, calls, call, device = _LAYOUT.unpack(data)
    return Position(passes, index, program, pid, since_s, bool(waits), calls, call, device)


def position_in(path: Path) -> Position:
    """The position in a rank's file."""
    return _read(path.read_bytes())


def progress_file(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its position."""
    return folder / f"rank-{rank}.progress"


def positions_of(folder: Path, num_ranks: int) -> dict[int, Position]:
    """The last positions of the ranks of a run, without those that never joined."""
    found = {}
    for rank in range(num_ranks):
        with contextlib.suppress(OSError, struct.error):
            found[rank] = position_in(progress_file(folder, rank))
    return {rank: position for rank, position in found.items() if position.pid}
