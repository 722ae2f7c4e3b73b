"""The launcher's side of processes that are started again after a repair in place; see `pipefit.runtime.joining`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pipefit.errors import PipefitError
from pipefit.runtime.joining import AWAY, DOOR, ENTER, READY, Entry

_log = logging.getLogger("pipefit.launch")


class Newcomers:
    """The processes that are started again, one at a time. One that has failed is not started another time.

    Args:
        num_ranks: of the run at its beginning.
        tell: says a word to a process.

    Attributes:
        start: starts the process of a rank after some faults, and returns its number; None: none is started.
        process: number of the one that is to enter; −1: there is none.
        is_entering: the ranks meet with one.
        entered: that have entered.
    """

    def __init__(self, num_ranks: int, tell: Callable[[int, str, Any], None]) -> None:
        self.start: Callable[[int, int], int] | None = None
        self.process = -1
        self.is_entering = False
        self.entered = 0
        self._tell = tell
        self._num_ranks = num_ranks
        self._home = {rank: rank for rank in range(num_ranks)}
        self._facts: Any = None
        self._number = 0
        self._at_door: set[int] = set()

    def home_of(self, process: int) -> int:
        """The rank at the beginning whose place a process has."""
        return self._home[process]

    def _missing(self, processes: Sequence[int]) -> list[int]:
        """The ranks of the beginning in whose places there are no processes."""
        return sorted(set(range(self._num_ranks)) - set(map(self.home_of, processes)))

    def look(self, left: Sequence[int], faults: int) -> None:
        """Starts a process in the place of a missing rank, or announces one that waits; the ranks are all there."""
        self.is_entering = False
        missing = self._missing(left)
        if self.process >= 0:
            self._announce(left)
        elif missing and self.start:
            _log.warning("rank %d is started again, and the others go on meanwhile", missing[0])
            try:
                self.process = self.start(missing[0], faults)
            except (PipefitError, OSError) as problem:
                self._give_up(str(problem))
                return
            self._home[self.process] = missing[0]
            self._facts = None

    def hears(self, process: int, word: str, what: Any, left: Sequence[int]) -> bool:
        """Takes a word of a process; returns whether all ranks stand at the door."""
        if word == READY and process == self.process:
            self._facts = what
            self._announce(left)
        elif word == DOOR and what[0] == self._number:
            self._at_door.add(process)
            if not what[1]:
                return self._at_door >= set(left)
            self.failed(self.process, what[1], left)
        return False

    def _announce(self, left: Sequence[int]) -> None:
        """Announces a process that is ready, under a new number."""
        if self._facts is not None:
            self.interrupt()
            for rank in left:
                self._tell(rank, READY, (self._number, self._facts))

    def interrupt(self) -> None:
        """Takes the announcement back, after the loss of a rank, of which all hear."""
        self._at_door = set()
        self._number += 1

    def failed(self, process: int, why: str, left: Sequence[int]) -> None:
        """Tells all that a process does not enter."""
        if process == self.process:
            self.process = -1
            self._give_up(why)
            self.interrupt()
            for other in (*left, process):
                self._tell(other, AWAY, None)

    def _give_up(self, why: str) -> None:
        """Starts no more processes."""
        _log.warning("the ranks go on without it: %s", why)
        self.start = None

    def admit(self, ranks: Sequence[int], faults: int) -> list[int]:
        """Lets the process enter that all wait for; returns the processes in the order of the new ranks."""
        order = sorted([*ranks, self.process], key=self.home_of)
        _log.warning("rank %d enters: %d ranks go on", self.home_of(self.process), len(order))
        self.process = -1
        self.is_entering = True
        self.entered += 1
        for rank, process in enumerate(order):
            entry = Entry(rank, len(order), self._missing(order), self.entered, faults)
            self._tell(process, ENTER, tuple(entry))
        return order
