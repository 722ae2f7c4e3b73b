"""Repair of a run in place, after the loss of a rank: the ranks that are left go on in the same processes.

    launcher   a process dies ─► "lost" ─► all ranks that are left say where they are ─► "go": where all are
    a rank     shuts down its sockets, so every wait ends ─► "here" ─► meets the others in new process groups
               ─► takes the plan without the lost rank ─► "back"

All that ranks do together consists of **units**: a step, an evaluation, a save. A unit ends with a **commit**, a sum
over all ranks. A rank that has passed a commit knows that all have come to it, so after a loss the numbers of commits
that ranks have passed differ by one at most. Then those that are behind have done all that the unit needs of them, take
the sum from one that has it, and go on. Else the unit is repeated from its beginning, by all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipefit.errors import CommunicationError, PipefitError, is_lost_peer
from pipefit.parallel import waiting
from pipefit.runtime.joining import DOOR, READY, Door
from pipefit.runtime.notes import end_waits
from pipefit.runtime.progress import MEETING, Progress
from pipefit.runtime.sockets import open_sockets
from pipefit.spec.files import JsonObject
from pipefit.stage.accelerator import default_kind

T = TypeVar("T")

CAN = "can"
HERE = "here"
CANNOT = "cannot"
BACK = "back"
HUNG = "hung"
WORDS = (CAN, HERE, CANNOT, BACK, HUNG, READY, DOOR)
"""The words of a rank for its launcher."""

LOST = "lost"
GO = "go"
END = "end"
"""The words of the launcher for a rank."""

NOT_NEEDED = 64
"""Exit code of a process that shared a rank with one that is lost: it cannot go on without it."""

REPAIR = "PIPEFIT_REPAIR"
"""Variable that turns repairs off where it is 0: then all ranks are started again, with the same plan."""

_LOOK_S = 1.0
_WORD_S = 5.0
"""A rank that has lost another one waits so long for the launcher's word: it knows of every death, and its cause."""


channel: Connection | None = None
"""To the launcher, where the run may recover from faults."""

terminal: Sequence[int] = ()
"""Handles of the terminal's standard output and errors, of a rank that writes to its log."""


class InterruptedUnitError(Exception):
    """A unit was interrupted by the loss of a rank, and is to be repeated."""


class Loss(NamedTuple):
    """The loss of ranks, which the launcher has reported.

    Attributes:
        number: of the report in this run, from 1.
        lost: their ranks.
        left: the ranks that are left, which get new numbers in this order.
    """

    number: int
    lost: list[int]
    left: list[int]


class Answer(NamedTuple):
    """The launcher's answer when all ranks that are left are there.

    Attributes:
        faults: of the run so far.
        states: of these ranks: the number of commits that each has passed, and the sum of the last one.
    """

    faults: int
    states: list[JsonObject]


class Repairs:
    """The repairs of this process's run.

    Args:
        channel: to the launcher.
        faults: of the run before this start.
        progress: of this rank.

    Attributes:
        faults: of the run so far.
        losses: that were repaired.
        commits: that this rank has passed.
        only_once: the reason why the unit that runs cannot be repeated.
        check: refuses a loss that cannot be repaired, by a PipefitError with the reason.
        mend: goes on without the lost ranks, in new process groups.
        door: for a process that is started again.
    """

    def __init__(self, channel: Connection, faults: int, progress: Progress) -> None:
        self._progress = progress
        self.faults = faults
        self.losses: list[Loss] = []
        self.only_once = ""
        self.check: Callable[[Loss], None] = _refuse
        self.mend: Callable[[Loss], None] = _refuse
        self.door = Door()
        self._channel = channel
        self._speaking = threading.Lock()
        self._before = open_sockets()
        self.commits = 0
        self._value: list[float] = []
        self.is_inside = False
        self._is_listening = self._can = False
        self._mending: Loss | None = None
        self._changed = threading.Condition()
        self._loss: Loss | None = None
        self._answer: Answer | None = None
        self._has_ended = False

    def listen(self, why_not: str = "") -> None:
        """Says that this rank can go on without another one, or why it cannot."""
        if not self._is_listening:
            self._is_listening = True
            threading.Thread(target=self._hear, name="pipefit-repairs", daemon=True).start()
        self._can = not why_not
        waiting.can_leave = self._can and default_kind() == "cpu"
        self.say(CAN, why_not)

    def hung(self, rank: int | None, faults: int, page: str) -> bool:
        """Reports a rank that hangs, which the launcher then ends; returns whether it can be repaired.

        Args:
            rank: its number; None: not known. Another rank may have reported it already: one that is being ended seems
                to wait like all others.
            faults: of the run when the ranks got their numbers. After a later one the launcher takes no report.
            page: about it.
        """
        if not self._can:
            return False
        if rank is None:
            with self._changed:
                return self._changed.wait_for(lambda: self._loss is not None or faults != self.faults, _WORD_S)
        self.say(HUNG, (rank, faults, page))
        return True

    def take_terminal(self) -> None:
        """Lets this process write to the terminal, as rank 0 does."""
        sys.stdout.flush()
        sys.stderr.flush()
        for standard, handle in zip((1, 2), terminal, strict=False):
            os.dup2(handle, standard)

    def say(self, word: str, what: Any) -> None:
        """Says something to the launcher."""
        with self._speaking, contextlib.suppress(OSError):
            self._channel.send_bytes(pickle.dumps((word, what)))

    def _hear(self) -> None:
        """Hears the launcher, and ends the waits of this process when a rank is lost."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                patience_s = None
                if self._loss is not None:
                    patience_s = _LOOK_S
                if not self._channel.poll(patience_s):
                    self._look()
                    continue
                word, what = self._channel.recv()
                with self._changed:
                    if word == LOST:
                        self._loss = Loss(*what)
                    elif word == GO:
                        self._answer = Answer(*what)
                    elif word == END:
                        self._has_ended = True
                    self._changed.notify_all()
                if word != GO:
                    self.door.hears(word, what)
                if word == LOST:
                    self.end_waits()

    def _look(self) -> None:
        """Ends the waits that have begun since a loss, as on a connection that was being made.

        Gives the repair up where this rank still makes process groups: a connection that it awaits never comes.
        """
        with self._changed:
            is_over = self._loss is None or self._answer is not None
            if not is_over:
                self.end_waits()
        if not is_over and self._progress.position.index == MEETING:
            self.refuse("it was making process groups")

    def end_waits(self) -> None:
        """Ends the waits of this process for others, in every thread."""
        end_waits(self._before, self._progress)

    def check_none_is_lost(self) -> None:
        """Comes before a sum that is a commit: what a GPU receives after a loss is of no use, and raises no error.

        Raises:
            CommunicationError: ranks are lost.
        """
        if self._loss is not None:
            raise CommunicationError("another rank is lost")

    # ---- units -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The context of work that is repeated as a whole: units and commits inside it are parts of it."""
        self.is_inside = True
        self.only_once = ""
        try:
            yield
        finally:
            self.is_inside = False

    def repeated(self, work: Callable[[], T]) -> T:
        """Runs a unit that ends with a commit; again from its beginning when ranks are lost before that."""
        if self.is_inside:
            return work()
        self.go_on()
        while True:
            before = self.commits
            try:
                result = work()
            except InterruptedUnitError:
                self.go_on()
            except Exception as problem:  # of any kind: it may come from numbers that a GPU has not received
                if self.commits != before or not self._is_of_loss(problem):
                    raise
                self._meet(problem)
                self.go_on()
            else:
                self.only_once = ""
                self.go_on()
                return result

    def commit(self, wait: Callable[[], object], total: Tensor) -> None:
        """Waits for a sum that is a commit.

        Args:
            wait: for the sum.
            total: its tensor, one-dimensional.

        Raises:
            InterruptedUnitError: ranks are lost, and no rank has the sum.
        """
        if self.is_inside:
            wait()
            return
        try:
            wait()
        except RuntimeError as problem:
            if not self._is_of_loss(problem):
                raise
            before = self.commits
            self._meet(problem)
            if self.commits == before:
                raise InterruptedUnitError from problem
            total.copy_(torch.tensor(self._value, dtype=total.dtype))
            return
        self.commits += 1
        self._value = total.tolist()

    def _is_of_loss(self, problem: BaseException) -> bool:
        return self._is_listening and (is_lost_peer(problem) or self._loss is not None)

    def go_on(self) -> None:
        """Goes on without the lost ranks, if some are lost."""
        loss = self._mending
        if loss is None:
            return
        self.losses.append(loss)
        try:
            with self.inside():
                self.mend(loss)
        except PipefitError as why:
            self.refuse(str(why))
            raise CommunicationError(f"the run does not go on without the lost ranks: {why}") from None
        except RuntimeError as problem:
            if is_lost_peer(problem):
                self.await_word()
            raise
        self._mending = None
        self.say(BACK, loss.number)

    # ---- after a loss ----------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Says that this rank cannot go on without the lost ones, if some are lost: all are started again."""
        if self._is_listening:
            self.say(CANNOT, why)

    def _meet(self, problem: BaseException) -> None:
        """Waits until all ranks that are left are here, and passes the commit that one of them has passed.

        Raises:
            BaseException: the problem, where the run is not repaired.
        """
        self.await_word()
        answer = None
        while answer is None:
            loss = self._loss
            if loss is None or self._has_ended:
                raise problem
            try:
                if self.only_once:
                    raise PipefitError(self.only_once)
                self.check(loss)
            except PipefitError as why:
                self.refuse(str(why))
                raise problem from None
            here = {"commits": self.commits, "value": self._value}
            self.say(HERE, (loss.number, here))
            answer = self._answer_to(loss)
        self.faults = answer.faults
        self._mending = loss
        self._catch_up(answer.states)

    def await_word(self) -> None:
        """Waits for the launcher's word about a rank that this one has lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss or self._has_ended, _WORD_S)

    def _answer_to(self, loss: Loss) -> Answer | None:
        """The launcher's answer; None: another rank was lost meanwhile, or the run ends."""

        def is_over() -> bool:
            return self._has_ended or self._answer is not None or self._loss != loss

        with self._changed:
            self._changed.wait_for(is_over)
            answer = self._answer
            self._answer = None
            if answer is not None:
                self._loss = None
            return answer

    def _catch_up(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Passes the commit that another rank has passed."""
        newest = max(states, key=lambda state: state["commits"])
        missed = newest["commits"] - self.commits
        assert missed <= 1, "no rank passes a commit to which not all have come"
        if missed:
            self.commits = newest["commits"]
            self._value = newest["value"]


def _refuse(loss: Loss) -> None:
    raise PipefitError("there is no training yet")
