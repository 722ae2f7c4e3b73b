"""Ends a rank that waits too long, and names the rank that causes it: `torch.distributed` cannot interrupt a wait.

A thread checks the rank's position. When it has been at one instruction for longer than a deadline, the thread follows
the waits through the ranks' positions to a rank that waits for no other, writes one page about it, and ends the
process; the launcher then ends the others and shows the page's first lines. Where the others can go on without the rank
that causes the wait, the launcher ends that one instead (`pipefit.runtime.repairs`).
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from pipefit.errors import PipefitError
from pipefit.ir.program import Program
from pipefit.runtime.notes import Notes
from pipefit.runtime.progress import JOINING, OUTSIDE, Position, Progress, positions_of
from pipefit.runtime.repairs import Repairs
from pipefit.runtime.signals import STACK_SIGNAL, stack_file
from pipefit.runtime.waits import cause_of, hang_report, patience, where
from pipefit.spec.files import write_atomically

HANG_EXIT = 75
_FLOOR_S = 60.0
_FIRST_S = 600.0
_FACTOR = 10.0
_KEPT_PASSES = 31
_ANSWER_S = 0.2
_MISSED_S = 1.0
"""A rank that stands as long publishes its call, or looks for the calls of others."""


def deadline_from_environment() -> float | None:
    """The step deadline in PIPEFIT_DEADLINE_S; None where it is not set.

    Raises:
        PipefitError: it is not a number of seconds.
    """
    text = os.environ.get("PIPEFIT_DEADLINE_S", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise PipefitError(f"PIPEFIT_DEADLINE_S: expected seconds, 0 for no deadline, got {text!r}")
    return seconds


class Watchdog:
    """Watches one rank.

    The deadline is ten times the median step so far and at least a floor, which is 60 s (600 s in the first pass, which
    compiles and warms up) unless it is given.

    Args:
        rank: the rank of this process.
        num_ranks: the number of ranks of the run.
        progress: the progress of this rank.
        folder: the folder of a run that pipefit has started, for the page; else None.
        shared: folder of the positions of the ranks on this machine; None: unknown.
        notes: of this rank.
        floor_s: smallest deadline; 0: no deadline.
        repairs: of the run: the rank that causes a hang is lost, and the others go on; None: there are none.
        before: the one that watched this process before a repair, whose steps count; None: this is the first.

    Attributes:
        stands_before: returns the function that asks this rank's GPU, as long as there is one.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        progress: Progress,
        folder: Path | None,
        shared: Path | None,
        notes: Notes,
        floor_s: float | None = None,
        repairs: Repairs | None = None,
        before: Watchdog | None = None,
    ) -> None:
        self._repairs = repairs
        self._notes = notes
        self._faults = 0
        if repairs is not None:
            self._faults = repairs.faults
        self._rank = rank
        self._num_ranks = num_ranks
        self._progress = progress
        self._folder, self._shared = folder, shared
        self._given_s = floor_s
        self._program: Program | None = None
        self.stands_before: Callable[[], Callable[[], int] | None] = lambda: None
        self._steps_s: deque[float] = deque(before._steps_s if before else (), maxlen=_KEPT_PASSES)
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="pipefit-watchdog", daemon=True).start()
        # A store that cannot be reached blocks this thread, but not the one above.
        self._calls = threading.Thread(target=self._compare_calls, name="pipefit-calls", daemon=True)
        self._calls.start()

    @property
    def deadline_s(self) -> float:
        """Seconds that one instruction may take now."""
        floor = self._given_s
        if floor == 0:
            return math.inf
        if floor is None:
            if self._steps_s:
                floor = _FLOOR_S
            else:
                floor = _FIRST_S
        return max(floor, _FACTOR * statistics.median(self._steps_s) if self._steps_s else 0.0)

    @contextlib.contextmanager
    def passing(self, program: Program) -> Iterator[None]:
        """The context of a pass over a program, during which it is watched."""
        began = time.monotonic()
        self._program = program
        try:
            yield
        except BaseException:
            # The position stays, for the message that names the last instruction; the user's code follows.
            self._stop.set()
            raise
        self._steps_s.append((time.monotonic() - began) / program.header.num_steps)
        self._progress.at(OUTSIDE)

    def stop(self) -> None:
        """Stops watching."""
        self._stop.set()
        self._calls.join(_MISSED_S)

    def _watch(self) -> None:
        interval = min(1.0, (self._given_s or _FLOOR_S) / 10)
        seen = self._progress.position
        stood_s = 0.0
        before = time.monotonic()
        while not self._stop.wait(interval):
            now, position = time.monotonic(), self._progress.position
            # The time in which this process was stopped must not count as a hang.
            if position == seen:
                stood_s = stood_s + min(now - before, 2 * interval)
            else:
                stood_s = 0.0
            seen, before = position, now
            stands_before = self.stands_before()
            if stood_s and stands_before is not None:
                self._progress.device_at(stands_before())
            if stood_s > self.deadline_s and self._is_watched(position):
                positions = self._positions(position)
                if stood_s > patience(self._rank, self._program, positions, self.deadline_s, now):
                    page = self._page(positions, stood_s)
                    if self._is_repaired(positions, page):
                        return
                    self._end(page)

    def _compare_calls(self) -> None:
        """Leaves a note about the call in which this rank waits, and ends its waits for ranks that never come."""
        seen = self._progress.position
        while not self._stop.wait(_MISSED_S):
            before, seen = seen, self._progress.position
            if seen != before:
                continue
            place = where(self._program, self._rank, seen)
            self._notes.look(self._rank, seen, place, self._end)

    def _positions(self, own: Position) -> dict[int, Position]:
        """The positions that are known on this machine."""
        if self._shared is None:
            others = {}
        else:
            others = positions_of(self._shared, self._num_ranks)
        return {rank: position.of_device for rank, position in {**others, self._rank: own}.items()}

    def _is_watched(self, position: Position) -> bool:
        """Returns whether it is a place of pipefit's: the user's code may take any time, other machines start late."""
        if position.index == JOINING and self._folder is None:
            return False
        return position.index != OUTSIDE or position.waits

    def _page(self, positions: dict[int, Position], stood_s: float) -> str:
        return hang_report(
            self._rank,
            self._program,
            positions,
            stood_s,
            self.deadline_s,
            self._num_ranks,
            lambda rank: self._stack_of(rank, positions[rank].pid),
        )

    def _is_repaired(self, positions: dict[int, Position], page: str) -> bool:
        """Reports the rank that causes a hang, where the others can go on without it."""
        cause, _ = cause_of(self._rank, self._program, positions, self._num_ranks)
        return self._repairs is not None and self._repairs.hung(cause, self._faults, page)

    def _end(self, page: str) -> None:
        if self._folder is not None and any(self._folder.glob("rank-*.hang")):
            os._exit(HANG_EXIT)  # another rank was first, and is gone now
        if self._folder is not None:
            with contextlib.suppress(PipefitError):
                write_atomically(self._folder / f"rank-{self._rank}.hang", page)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(page)
            sys.stderr.flush()
        os._exit(HANG_EXIT)

    def _stack_of(self, rank: int, pid: int) -> str:
        """The Python stack of a rank; "" where it does not answer."""
        if self._folder is not None and (file := stack_file(self._folder, rank)).exists():
            with contextlib.suppress(OSError):
                os.kill(pid, STACK_SIGNAL)
                time.sleep(_ANSWER_S)
                return file.read_text(encoding="utf-8", errors="replace")
        return ""
