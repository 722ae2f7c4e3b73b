"""The launcher's side of processes that are started again after a repair in place; see `pipefit.runtime.joining`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pipefit.errors import PipefitError
from pipefit.runtime.joining import AWAY, DOOR, ENTER, READY, ROOM, Entry
from pipefit.runtime.signals import death

_log = logging.getLogger("pipefit.launch")


class Newcomers:
    """The processes that are started again, one at a time. One that has failed is not started another time.

    Args:
        num_ranks: of the run at its beginning.
        tell: says a word to a process.

    Attributes:
        start: starts the process of a rank after some faults, and returns its number; None: none is started.
        process: number of the one that is to enter; None: there is none.
        entering: number of the one with which the others meet now.
        entered: that have entered.
    """

    def __init__(self, num_ranks: int, tell: Callable[[int, str, Any], None]) -> None:
        self.start: Callable[[int, int], int] | None = None
        self.process: int | None = None
        self.entering: int | None = None
        self.entered = 0
        self._tell = tell
        self._home = {rank: rank for rank in range(num_ranks)}
        self._all = set(range(num_ranks))
        self._why_not = ""
        self._facts: Any = None
        self._number = 0
        self._at_door: set[int] = set()

    def home_of(self, process: int) -> int:
        """The rank at the beginning whose place a process has."""
        return self._home[process]

    def look(self, left: Sequence[int], faults: int) -> None:
        """Starts a process in the place of a missing rank, or announces one that waits; the ranks are all there."""
        self.entering = None
        missing = sorted(self._all - {self._home[process] for process in left})
        if self.start is None or not missing:
            return
        if self.process is not None:
            self._announce(left)
            return
        if self._why_not:
            self._give_up(f"rank {missing[0]} is not started again: {self._why_not}")
            return
        try:
            process = self.start(missing[0], faults)
        except (PipefitError, OSError) as problem:
            self._give_up(f"rank {missing[0]} could not be started again: {problem}")
            return
        self._home[process] = missing[0]
        self.process = process
        self._facts = None

    def hears(self, process: int, word: str, what: Any, left: Sequence[int]) -> bool:
        """Takes a word of a process; returns whether all ranks stand at the door."""
        if word == ROOM:
            self._why_not = what
        elif word == READY and process == self.process:
            self._facts = what
            self._announce(left)
        elif word == DOOR and what[0] == self._number and self.process is not None:
            if what[1]:
                self._dismiss(what[1], left)
                return False
            self._at_door.add(process)
            return self._at_door >= set(left)
        return False

    def _announce(self, left: Sequence[int]) -> None:
        """Announces a process that is ready, under a new number."""
        if self._facts is None:
            return
        self._number += 1
        self._at_door = set()
        for rank in left:
            self._tell(rank, READY, (self._number, self._facts))

    def interrupt(self) -> None:
        """Takes the announcement back, after the loss of a rank, of which all hear."""
        self._at_door = set()
        self._number += 1

    def failed(self, process: int, kind: str, what: Any, left: Sequence[int]) -> None:
        """Takes the outcome of a process that has not entered."""
        if process != self.process:
            return
        why = str(what)
        if kind == "died":
            why = death(what)
        self._dismiss(why, left)

    def _dismiss(self, why: str, left: Sequence[int]) -> None:
        assert self.process is not None
        self._give_up(f"rank {self._home[self.process]} was started again, and does not enter: {why}")
        self.process = None
        self._number += 1
        for rank in left:
            self._tell(rank, AWAY, None)

    def _give_up(self, why: str) -> None:
        """Starts no more processes."""
        _log.warning("%s", why)
        self.start = None

    def admit(self, ranks: Sequence[int], faults: int) -> list[int]:
        """Lets the process enter that all wait for; returns the processes in the order of the new ranks."""
        assert self.process is not None
        order = sorted([*ranks, self.process], key=self.home_of)
        members: list[int | None] = []
        for process in order:
            if process == self.process:
                members.append(None)
            else:
                members.append(list(ranks).index(process))
        absent = sorted(self._all - {self._home[process] for process in order})
        self.entered += 1
        self.entering = self.process
        self.process = None
        _log.warning("rank %d enters: %d ranks go on", self._home[self.entering], len(order))
        for process in order:
            self._tell(process, ENTER, tuple(Entry(members, absent, self.entered, faults)))
        return order

    def end(self) -> None:
        """Says that a process has not come before the end of the run."""
        if self.process is not None:
            self._give_up(f"rank {self._home[self.process]} was started again, and was not ready before the end")
