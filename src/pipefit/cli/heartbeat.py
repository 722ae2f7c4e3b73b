"""Lines that say what a program is doing, where it would be silent for long."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Self, TextIO

from pipefit.cli.answer import printable

_LOOK_S = 0.1
_FIRST_S = 0.6
NEXT_S = 5.0
"""Seconds between looks at what is done, until a line names it, and between two lines."""


def gap_s(seconds: float) -> float:
    """Seconds between two lines after so many seconds of work: a long run does not fill its log."""
    return max(NEXT_S, seconds / 10)


class Heartbeat:
    """The context of work that is never silent for long.

    Args:
        stream: for the lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # What is done, since when, when the last line was written, and whether one of them names it.
        self._what = ""
        self._since_s = 0.0
        self._said_s = time.monotonic()
        self._is_named = True
        self._began_s = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="pipefit-heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.beat(time.monotonic())

    def doing(self, what: str, is_named: bool = False) -> None:
        """Notes what is done now; a line says so if it takes more than a moment.

        Args:
            what: in words.
            is_named: whether other lines name it.
        """
        self._what = what
        self._since_s = time.monotonic()
        self._is_named = is_named

    def beat(self, now: float) -> None:
        """Says what is done if there was no line for long.

        Args:
            now: seconds of `time.monotonic`.
        """
        gap = _FIRST_S
        line = f"{self._what} …"
        if self._is_named:
            gap = gap_s(now - self._began_s)
            line = f"{self._what}: {now - self._since_s:.0f} s so far"
        if self._what and now - max(self._said_s, self._since_s) >= gap:
            self._print(line)
            self._said_s = now
            self._is_named = True

    def _print(self, text: str) -> None:
        self._write(printable(text) + "\n")
        self._said_s = time.monotonic()

    def _write(self, text: str) -> None:
        # A reader that ends does not stop the work.
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
            self._stream.flush()
