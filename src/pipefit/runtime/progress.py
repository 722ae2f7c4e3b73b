"""Where each rank is: a few numbers in a small shared file, so that the last instruction of a dead rank can be named."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Position", "Progress"]

_LAYOUT = struct.Struct("qqd")


class Position(NamedTuple):
    """How far a rank has come: passes begun, index in the program's list, and when it got there (monotonic seconds)."""

    passes: int
    index: int
    since_s: float


class Progress:
    """One rank's position, written by the rank and readable by others after its death."""

    def __init__(self, path: Path | None = None) -> None:
        self.passes = 0
        self._memory: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
        if path is not None:
            path.write_bytes(bytes(_LAYOUT.size))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def at(self, index: int) -> None:
        """The rank begins the instruction at `index`."""
        _LAYOUT.pack_into(self._memory, 0, self.passes, index, time.monotonic())

    @property
    def position(self) -> Position:
        """Where the rank is."""
        return Position(*_LAYOUT.unpack_from(self._memory))

    @staticmethod
    def read(path: Path) -> Position | None:
        """The last position in a rank's file; None when it never began."""
        try:
            position = Position(*_LAYOUT.unpack(path.read_bytes()))
        except (OSError, struct.error):
            return None
        return position if position.passes else None
