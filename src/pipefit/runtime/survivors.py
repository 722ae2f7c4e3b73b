"""The launcher's side of repairs in place (`pipefit.runtime.repairs`): it knows who is left, and where all are."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pipefit.runtime.faults import note
from pipefit.runtime.newcomers import Newcomers
from pipefit.runtime.repairs import BACK, CAN, CANNOT, END, GO, HERE, HUNG, LOST, REPAIR

_log = logging.getLogger("pipefit.launch")


class Survivors:
    """The processes of a start that are left.

    Args:
        processes: by number.
        pipes: to each of them.
        place: the folder of the run.
        faults: of the run before this start.
        most: faults from which the run may recover.
        deadline_s: in which those that are left must come together.

    Attributes:
        newcomers: processes that are started again.
        left: the numbers of the processes that are left, in the order of their ranks.
        lost: the outcomes of those without which the others have yet to go on.
        hung: pages about processes that were ended because they hung.
        faults: of the run so far.
        began_s: time of the loss (Unix seconds).
        why_not: reasons why there was no repair.
        undone: the message about a fault that the ranks that are left found out to be beyond repair.
    """

    def __init__(
        self,
        processes: Sequence[Any],
        pipes: Sequence[Any],
        place: Path,
        faults: int,
        most: int,
        deadline_s: float,
    ) -> None:
        self.newcomers = Newcomers(len(processes), self._tell)
        self.left = list(range(len(processes)))
        self.lost: dict[int, tuple[str, Any]] = {}
        self.hung: dict[int, str] = {}
        self.faults = faults
        self.began_s = 0.0
        self.why_not: list[str] = []
        self.undone = self._fault = ""
        self._processes = processes
        self._pipes = pipes
        self._place = place
        self._most = most
        self._ranks = list(self.left)
        self._number = 0
        self._said: list[str] = []
        self._can: dict[int, str] = {}
        self._here: dict[int, Any] = {}
        self._joining: set[int] = set()
        self._has_ended = False
        self._deadline_s = deadline_s
        self._until_s = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that those that are left may take to come together; None: nothing is under way."""
        if not self.lost:
            return None
        return max(self._until_s - time.monotonic(), 0)

    @property
    def present(self) -> list[int]:
        """The numbers of the processes that are left, and of the one that was started again."""
        if self.newcomers.process < 0:
            return self.left
        return [*self.left, self.newcomers.process]

    def give_up(self, reason: str) -> None:
        """Ends a repair that is under way, if one is."""
        if self.lost:
            self._fail(reason)

    def rank_of(self, process: int) -> int:
        """The rank of a process, also of one that was lost and without which the others have yet to go on."""
        return self._ranks.index(process)

    def hears(self, process: int, word: str, what: Any) -> None:
        """Takes a word of a process."""
        if word == CAN:
            self._can[process] = what
        elif word == CANNOT and process not in self.left:
            return
        elif word == CANNOT and self.lost:
            self._fail(f"rank {self.rank_of(process)}: {what}")
        elif word == CANNOT and self._joining and not self._has_ended:
            self._undo(what)
        elif word == HUNG:
            self._kill(*what)
        elif word == BACK:
            self._joining.discard(process)
            if not self._joining and not self.lost and not self._has_ended:
                self.newcomers.look(self.left, self.faults)
        elif word == HERE and what[0] == self._number:
            self._here[process] = what[1]
            if self._here.keys() >= set(self.left):
                self._go()
        elif self.newcomers.hears(process, word, what, self.left):
            self._admit()

    def _admit(self) -> None:
        """Lets a process that was started again enter: all get new numbers, and meet."""
        self.left = self.newcomers.admit(self._ranks, self.faults)
        self._ranks = list(self.left)
        self._joining = set(self.left)

    def _undo(self, why: str) -> None:
        """Ends a meeting that has failed: of the ranks that are left, or with a process that was started again."""
        if self.newcomers.is_entering:
            self.undone = "a rank was started again, but could not enter"
        else:
            self.undone = self._fault
            self.faults -= 1
        self._fail(why)

    def _kill(self, rank: int, faults: int, said: str) -> None:
        """Kills a process that hangs: then it is lost. Of several reports at a time the first one counts."""
        if faults == self.faults and not self.lost and self.hung.keys().isdisjoint(self.left):
            process = self._ranks[rank]
            self.hung[process] = said
            self._processes[process].kill()

    def lose(self, died: Mapping[int, tuple[str, Any]], said: Sequence[str], ended: AbstractSet[int]) -> bool:
        """Begins a repair after the loss of processes; returns whether there is one.

        Args:
            died: their outcomes.
            said: messages about them.
            ended: processes that have ended otherwise.
        """
        if not self.lost:
            self.began_s = time.time()
        left = [process for process in self.left if process not in died]
        reason = self._reason(left, ended)
        if reason:
            self._fail(reason)
            return False
        self.left = left
        self.newcomers.interrupt()
        self.lost |= died
        self._said += said
        self._number += 1
        self._here = {}
        self._until_s = time.monotonic() + self._deadline_s
        gone = [self.rank_of(process) for process in self.lost]
        still = [self.rank_of(process) for process in left]
        for process in left:
            self._tell(process, LOST, (self._number, gone, still))
        return True

    def _reason(self, left: Sequence[int], ended: AbstractSet[int]) -> str:
        """The reason why the processes that are left do not go on; "": they do."""
        if self._joining:
            return "a rank was lost while the others met again"
        if self._has_ended or self.faults == self._most:
            return "the run may not recover once more"
        if os.environ.get(REPAIR) == "0":
            return f"{REPAIR} is 0"
        if not left or not ended.isdisjoint(left):
            return "another rank has ended"
        for process in left:
            reason = self._can.get(process, "the training had not begun")
            if reason:
                return reason
        return ""

    def _go(self) -> None:
        """All are here: notes the fault, and lets them go on."""
        fault = "\n".join(self._said)
        note(self._place, self.began_s, fault=fault, start=self.faults)
        self.faults += 1
        self._fault = fault
        _log.warning("%s\n  repair %d of %d: %d ranks go on", fault, self.faults, self._most, len(self.left))
        states = [self._here[process] for process in self.left]
        self._ranks = list(self.left)
        self._joining = set(self.left)
        self.lost = {}
        self._said = []
        self.began_s = 0.0
        for process in self.left:
            self._tell(process, GO, (self.faults, states))

    def _fail(self, reason: str) -> None:
        self.why_not.append(reason)
        self.end()

    def end(self) -> None:
        """Lets the processes end that wait for a repair: there is none."""
        if not self._has_ended:
            self._has_ended = True
            for process in self.left:
                self._tell(process, END, None)

    def _tell(self, process: int, word: str, what: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipes[process].send((word, what))
