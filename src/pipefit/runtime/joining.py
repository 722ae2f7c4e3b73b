"""A process that is started again after a repair in place, and enters the run at the end of a step.

    launcher      a repair is done ─► a new process ··· "ready" ─► to all ranks ··· all stand at the door ─► "enter"
    new process   the user's code, without the others, to its first `fit` ─► "ready" ─► waits ─► meets the others
    a rank        trains; in every step all say of which process they know ─► the same one: "door" ─► meets the others

Until the launcher has said "enter", the new process may fail or hang, and nobody waits for it: the launcher takes its
announcement back, or makes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from pipefit.errors import PipefitError

ROOM = "room"
READY = "ready"
DOOR = "door"
"""The words of a rank, or of a process that is to enter, for the launcher."""

ENTER = "enter"
AWAY = "away"
"""The words of the launcher, which also passes "ready" on."""


class Entry(NamedTuple):
    """The ranks with a process that enters.

    Attributes:
        members: the number that each rank has had, in the order of the new numbers; None: it enters.
        absent: the ranks of the beginning that are still missing.
        entered: processes that have entered since all were started, with this one.
        faults: of the run so far.
    """

    members: list[int | None]
    absent: list[int]
    entered: int
    faults: int


class Door:
    """The side of one process.

    Attributes:
        agreed: number of the announcement of which all ranks knew in the last step whose losses were read; 0: none.
        facts: of the process that was announced last.
        admit: lets the process of an announcement enter, between two steps: with its number, the state of the training,
            and the next batch.
    """

    def __init__(self) -> None:
        self.agreed = 0
        self.facts: Any = None
        self.admit: Callable[[int, dict[str, Any], Any], None] = _refuse
        self._changed = threading.Condition()
        self._announced = 0
        self._withdrawn = 0
        self._entry: Entry | None = None

    @property
    def known(self) -> int:
        """Number of the announcement that this rank knows; 0: there is none, or it was withdrawn."""
        with self._changed:
            if self._announced > self._withdrawn:
                return self._announced
            return 0

    def hears(self, word: str, what: Any) -> None:
        """Takes a word of the launcher; all but two withdraw the announcement: also the loss of a rank does."""
        with self._changed:
            if word == READY:
                self._announced, self.facts = what
            elif word == ENTER:
                self._entry = Entry(*what)
            else:
                self._withdrawn = self._announced
            self._changed.notify_all()

    def agree(self, total: float, squares: float, num_ranks: int) -> None:
        """Takes the sum of the numbers that all ranks know, and that of their squares."""
        self.agreed = 0
        if total and total**2 == squares * num_ranks:
            self.agreed = round(total / num_ranks)

    def wait(self, number: int | None = None) -> Entry | None:
        """Waits until the launcher lets a process enter.

        Args:
            number: of its announcement; None: it is this process.

        Returns:
            None: the announcement was withdrawn, or another one followed.
        """

        def is_over() -> bool:
            if self._entry is not None or number is None:
                return self._entry is not None
            return self._withdrawn >= number or self._announced > number

        with self._changed:
            self._changed.wait_for(is_over)
            entry = self._entry
            self._entry = None
            return entry


def _refuse(number: int, state: dict[str, Any], batch: Any) -> None:
    raise PipefitError("there is no training yet")
