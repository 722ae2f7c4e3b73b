"""The outcomes of a run's ranks: made in each of them, collected by the launcher, which names the first failure."""

from __future__ import annotations

import contextlib
import math
import pickle
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pipefit.errors import DisagreementError, PipefitError, is_lost_peer
from pipefit.ir import text
from pipefit.runtime.calls import ORDER
from pipefit.runtime.progress import positions_of
from pipefit.runtime.repairs import NOT_NEEDED, WORDS
from pipefit.runtime.signals import TERMINATED, leaving
from pipefit.runtime.survivors import Survivors
from pipefit.runtime.waits import where

GRACE_S = 2.0
"""After a first failure, for those of the other ranks and for their end."""

_REAP_S = 10.0
"""For the exit code of a process whose pipe has closed: on a busy machine it comes later."""

_SETTLE_S = 0.2
"""After a death, which is a first cause, for outcomes that are on their way."""

FINE = ("done", "stopped")
"""Outcomes that are not failures."""


def program_file(folder: Path, number: int) -> Path:
    """The file in which rank 0 leaves the program of a number, so that a position in it can be named."""
    return folder / f"program-{number}.pipe"


class LaunchError(PipefitError):
    """A rank failed; the message names the rank, its instruction and its log.

    Attributes:
        began: whether the rank had begun its first pass.
        raised: whether its own code raised an error; else it died, hung, or lost the others.
        time_s: of the first sign of it (Unix seconds).
        faults: of the run before it.
        why_not: the reason why the others did not go on without the rank.
        is_noted: whether the folder's notes have it.
        is_of_entry: whether the ranks met with a process that was started again.
    """

    time_s = 0.0
    faults = 0
    why_not = ""
    is_noted = False
    is_of_entry = False

    def __init__(self, message: str, began: bool = True, raised: bool = False) -> None:
        super().__init__(message)
        self.began, self.raised = began, raised


def outcome_of(function: Callable[..., Any], args: Sequence[Any], log: Path) -> tuple[str, Any]:
    """Runs the function among the ranks; returns the outcome in one word, and its result or error."""
    from pipefit.runtime import session

    try:
        own = session.current()
        try:
            outcome = ("done", function(*args))
        except SystemExit as ended:
            if ended.code == TERMINATED and own.stop.agreed:
                outcome = ("stopped", None)
            elif ended.code in (None, 0):
                outcome = ("done", None)
            else:
                raise
        session.leave()
        return outcome
    except BaseException as problem:
        with contextlib.suppress(OSError), log.open("a") as file:  # a full disk is not the cause
            traceback.print_exc(file=file)
        if is_lost_peer(problem):
            return "later", f"{type(problem).__name__}: {problem}"
        if isinstance(problem, PipefitError):
            return "refused", problem
        return "failed", f"{type(problem).__name__}: {problem}"


def packed(outcome: tuple[str, Any]) -> bytes:
    """The outcome for the parent: tensors by value, since shared memory would vanish with this process."""
    try:
        return pickle.dumps(outcome)
    except Exception as problem:  # of an error or a result that cannot be pickled the text is kept
        return pickle.dumps(("failed", f"{outcome[1]!r:.500} (not picklable: {problem})"))


def collect(
    processes: Sequence[Any], pipes: Sequence[Any], place: Path, asked: Sequence[int], survivors: Survivors
) -> list[tuple[str, Any]]:
    """Waits for the results of all ranks that are left; after a first failure, only briefly, to find the cause.

    After the loss of a rank the others may go on without it; see `Survivors`.
    """
    outcomes: dict[int, tuple[str, Any]] = {}
    deadline = math.inf
    first_s = 0.0
    while len(outcomes) < len(survivors.left):
        pending = {pipes[process]: process for process in survivors.present if process not in outcomes}
        timeout = survivors.left_s
        if deadline < math.inf:
            timeout = max(deadline - time.monotonic(), 0)
        ready: list[Any] = wait(list(pending), timeout)
        if not ready:
            survivors.give_up("another rank has not come")
            break
        for pipe in ready:
            process = pending[pipe]
            try:
                kind, what = pipe.recv()
            except (EOFError, OSError):  # reset, where a word of the launcher was not read
                processes[process].join(_REAP_S)
                kind, what = "died", processes[process].exitcode
            if kind in WORDS:
                survivors.hears(process, kind, what)
            elif process in survivors.left:
                outcomes[process] = kind, what
            else:
                survivors.newcomers.failed(process, f"{kind} ({what})", survivors.left)
        if first_s == 0.0 and not asked:
            _lose(outcomes, survivors, place)
        if survivors.lost and outcomes:
            survivors.give_up("another rank has ended")
        if survivors.why_not and (survivors.lost or survivors.undone):
            break
        for kind, _ in list(outcomes.values()):
            if kind not in FINE:
                first_s = first_s or time.time()
                grace_s = GRACE_S
                if kind == "died" and not asked:
                    grace_s = _SETTLE_S
                deadline = min(deadline, time.monotonic() + grace_s)
                survivors.end()
    failures = {process: outcome for process, outcome in outcomes.items() if outcome[0] not in FINE}
    if failures or len(outcomes) < len(survivors.left):
        failures |= survivors.lost
        if asked and all(kind in ("died", "later") for kind, _ in failures.values()):
            raise leaving(asked)  # their time was up
        if survivors.undone:
            problem: PipefitError = LaunchError(survivors.undone)
        else:
            problem = _failure(failures, place, survivors)
        if isinstance(problem, LaunchError):
            problem.time_s = survivors.began_s or first_s
            problem.faults = survivors.faults
            problem.is_of_entry = survivors.newcomers.is_entering
            problem.is_noted = bool(survivors.undone) and not problem.is_of_entry
            problem.why_not = "; ".join(survivors.why_not)
        raise problem
    return [outcomes[process] for process in survivors.left]


def _lose(outcomes: dict[int, tuple[str, Any]], survivors: Survivors, place: Path) -> None:
    """Leaves out the processes that have died, where the others go on without them."""
    died = {process: outcome for process, outcome in outcomes.items() if outcome[0] == "died"}
    if not died or any(place.glob("rank-*.hang")):
        return
    said = [str(_failure({process: outcome}, place, survivors)) for process, outcome in died.items()]
    if survivors.lose(died, said, outcomes.keys() - died.keys()):
        for process in died:
            del outcomes[process]


def _failure(failures: dict[int, tuple[str, Any]], place: Path, survivors: Survivors) -> PipefitError:
    """The error of the rank that failed first: one that died, refused or raised before one that lost its peer."""
    first = min(place.glob("rank-*.hang"), key=lambda path: path.stat().st_mtime, default=None)
    if first is not None:
        return _hang(first.read_text(encoding="utf-8"), f"\n  all of it: {first}")
    process = min(failures, key=lambda process: (_order(*failures[process]), process))
    rank = survivors.rank_of(process)
    if process in survivors.hung:
        return _hang(survivors.hung[process], "")
    kind, what = failures[process]
    if what == NOT_NEEDED:
        return LaunchError(f"rank {rank} has ended: it shared its layers with one that is lost")
    if kind == "refused" and isinstance(what, PipefitError):
        return what
    said = what
    if kind == "died":
        name = f"exit code {what}"
        if what and what < 0:
            name = signal.Signals(-what).name
        said = f"the process died ({name})"
    last, began = _last_place(rank, place)
    log = place / f"rank-{survivors.newcomers.home_of(process)}.log"
    return LaunchError(f"rank {rank} failed {last}: {said}\n  its log: {log}", began, kind == "failed")


def _hang(page: str, place: str) -> PipefitError:
    """The error of a run that hung, from the page about it."""
    said, _, rest = page.partition("positions of the ranks:\n")
    if ORDER in said:
        return DisagreementError(said.rstrip())
    return LaunchError(f"the run hung: {said.rstrip()}{place}\n{textwrap.indent(rest.rstrip(), '  ')}")


def _order(kind: str, what: Any) -> int:
    """The order of causes. No other rank's error makes the kernel kill one; a death by other signals may follow."""
    if kind == "died" and what == -signal.SIGKILL:
        return 0
    return 1 + ("refused", "died", "failed", "later").index(kind)


def _last_place(rank: int, place: Path) -> tuple[str, bool]:
    """The rank's last position, from its progress file and the program that rank 0 left; whether it began a pass."""
    position = positions_of(place, rank + 1).get(rank)
    if position is None or not position.passes:
        return "before its first instruction", False
    program = None
    with contextlib.suppress(PipefitError):
        program = text.load(program_file(place, position.program))
    return where(program, rank, position), True
