"""A process that is started again after a repair in place, and enters the run at the end of a step.

    launcher      a repair is done ─► a new process ··· "ready" ─► to all ranks ··· all stand at the door ─► "enter"
    new process   the user's code, without the others, to its first `fit` ─► "ready" ─► waits ─► meets the others
    a rank        trains; in every step all say of which process they know ─► the same one: "door" ─► meets the others

Until the launcher has said "enter", the new process may fail or hang, and nobody waits for it: the launcher takes its
announcement back, or makes none.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

READY = "ready"
DOOR = "door"
"""The words of a rank, or of a process that is to enter, for the launcher."""

ENTER = "enter"
AWAY = "away"
"""The words of the launcher, which also passes "ready" on."""

OWN = 1
"""In place of the number of an announcement: a loss comes before the first one, and takes this number."""


class Entry(NamedTuple):
    """The ranks with a process that enters.

    Attributes:
        rank: the new number of this process.
        num_ranks: with the process that enters.
        absent: the ranks of the beginning that are still missing.
        entered: processes that have entered since all were started, with this one.
        faults: of the run so far.
    """

    rank: int
    num_ranks: int
    absent: list[int]
    entered: int
    faults: int


class Door:
    """The side of one process.

    Attributes:
        facts: of the process that was announced last.
        growing: the growth of the training (`pipefit.pipeline.growing`), which lets a process enter between two steps.
    """

    growing: Any

    def __init__(self) -> None:
        self.facts: Any = None
        self._agreed = 0
        self._changed = threading.Condition()
        self._announced = 0
        self._withdrawn = 0
        self._entry: Entry | None = None

    @property
    def known(self) -> int:
        """Number of the announcement that this rank knows; 0: there is none, or it was withdrawn."""
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
                self._withdrawn = max(self._announced, OWN)
            self._changed.notify_all()

    def agree(self, total: float, squares: float, num_ranks: int) -> None:
        """Takes the sum of the numbers that all ranks know, and that of their squares."""
        self._agreed = 0
        if total and total**2 == squares * num_ranks:
            self._agreed = round(total / num_ranks)

    def take(self) -> int:
        """The number of the announcement of which all ranks know since the last step that was read, once; 0: none."""
        agreed = self._agreed
        self._agreed = 0
        return agreed

    def wait(self, number: int) -> Entry | None:
        """Waits until the launcher lets a process enter.

        Args:
            number: of its announcement; `OWN`: it is this process.

        Returns:
            None: the announcement was withdrawn, or another one followed.
        """

        def is_over() -> bool:
            return self._entry is not None or self._withdrawn >= number or self._announced > number

        with self._changed:
            self._changed.wait_for(is_over)
            entry = self._entry
            self._entry = None
            return entry
