"""Notes of ranks for which others wait in vain, in the store of the run; they end these waits.

    rank 1   step() raises ─► a note ─► its script catches the error, and goes on, sleeps or ends
    rank 0   waits for rank 1 in that step ─► a thread finds the note ─► ends the wait ─► step() raises the same

    rank 1   report() ─► waits in a roll call ─► a note, as only the first `step` has a roll call
    rank 0   step() ─► waits for rank 1 ─► finds the note ─► step() raises an error that names both calls

A note counts until the next roll call, in which all ranks meet. After an error in a pass a rank does not go on, because
messages of the others are under way; nor after a step on batches that differed.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed.distributed_c10d import _get_default_store

from pipefit.errors import CommunicationError, PipefitError
from pipefit.parallel import waiting
from pipefit.runtime.aborting import abort_groups
from pipefit.runtime.calls import ORDER, different_calls
from pipefit.runtime.meeting import QuickStore
from pipefit.runtime.progress import CALLS, LOSS, MEETING, TOGETHER, Position, Progress
from pipefit.runtime.sockets import open_sockets, shut_down
from pipefit.stage.accelerator import default_kind

_ENDING = 12
"""Looks, of a second each, at a rank whose waits do not end, as for another machine."""


class Note(NamedTuple):
    """The note of a rank.

    Attributes:
        passes: number of passes that the rank has begun.
        in_pass: whether it failed in the last one of them.
        kind: of the error that the others raise.
        text: of it.
        is_unit: it waits for the end of what all do together, in which others may still wait for each other.
    """

    passes: int
    in_pass: bool
    kind: str
    text: str
    is_unit: bool = False

    def is_awaited(self, here: Position) -> bool:
        """Returns whether a rank that stands somewhere waits for what the rank of this note will not do."""
        if here.index >= 0 or here.index == LOSS:
            return here.passes > self.passes or self.in_pass
        return here.waits and not self.is_unit


class Notes:
    """The notes that one rank leaves and finds.

    Args:
        progress: of this rank.

    Attributes:
        last: the note after which this rank does not go on; None: there is none.
    """

    def __init__(self, progress: Progress) -> None:
        self.last: Note | None = None
        self._progress = progress
        self._before = open_sockets()
        self._looks: Counter[Position] = Counter()

    def check(self) -> None:
        """Refuses to go on after an error in a pass, or a step on batches that differed.

        Raises:
            CommunicationError: there was one.
        """
        if self.last is not None:
            raise CommunicationError(f"{self.last.text}; after it this run cannot go on: start it again")

    def failed(self, place: str, problem: BaseException) -> None:
        """Leaves a note about an error of this rank.

        Args:
            place: this rank and its call, in words.
            problem: the error.
        """
        kind = type(problem).__name__
        text = str(problem)
        if not isinstance(problem, PipefitError):
            text = f"{place}: {kind}: {text}"
            kind = "CommunicationError"
        here = self._progress.position
        note = Note(here.passes, here.index >= 0, kind, text)
        if note.in_pass:
            self.last = note
        _leave(here.calls, note)

    @property
    def found(self) -> Note | None:
        """The note after which this rank does not go on, or one that was left since the last roll call."""
        return self.last or _find(self._progress.position.calls)

    def look(self, rank: int, here: Position, place: str, end: Callable[[str], None]) -> None:
        """Leaves a note where this rank waits in a roll call; ends its waits where a note says that nobody comes.

        Not at the first look: the rank may have what it waits for, and be about to go on.

        Args:
            rank: the rank of this process.
            here: its position, at which it has stood since the last look.
            place: this position in words.
            end: ends this process with a message, where its wait does not end.
        """
        if here.call and _find(here.calls - 1) is None:
            call = CALLS[here.call]
            said = different_calls({rank: call})
            _leave(here.calls - 1, Note(here.passes, False, "DisagreementError", said, call == TOGETHER))
        note = _find(here.calls)
        if note is None or not note.is_awaited(here):
            return
        self._looks[here] += 1
        if self._looks[here] == _ENDING:
            end(f"{note.text}\n")
        elif self._looks[here] == 2:
            text = note.text.replace(ORDER, f"; rank {rank} trains or evaluates, {place}{ORDER}")
            self.last = note._replace(text=text)
            _leave(here.calls + 1, self.last)
            end_waits(self._before, self._progress)


def _leave(calls: int, note: Note) -> None:
    """Leaves a note for ranks that have begun so many roll calls, where there is a store."""
    with contextlib.suppress(RuntimeError, ValueError):
        _get_default_store().set(f"pipefit/note/{calls}", json.dumps(note))


def _find(calls: int) -> Note | None:
    """The note for ranks that have begun so many roll calls; None: there is none, or no store."""
    key = f"pipefit/note/{calls}"
    with contextlib.suppress(RuntimeError, ValueError):
        store = _get_default_store()
        if store.check([key]):
            return Note(*json.loads(store.get(key)))
    return None


def end_waits(before: set[int], progress: Progress) -> None:
    """Ends the waits of this process for others, in every thread; its process groups are of no use any more.

    A group that is being made cannot be aborted.

    Args:
        before: inodes of the sockets that were there before the groups.
        progress: its position.
    """
    if QuickStore.newest is not None:
        QuickStore.newest.has_ended = True
    shut_down(before)
    waiting.leave()
    if default_kind() != "cpu" and progress.position.index != MEETING:
        abort_groups()
