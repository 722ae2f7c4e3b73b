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
from pipefit.runtime.signals import TERMINATED, leaving
from pipefit.runtime.waits import where

GRACE_S = 2.0
"""After a first failure, for those of the other ranks and for their end."""

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
    """

    time_s = 0.0

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
        with log.open("a") as file:
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


def collect(processes: Sequence[Any], pipes: Sequence[Any], place: Path, asked: Sequence[int]) -> list[tuple[str, Any]]:
    """Waits for every rank's result; after a first failure, only briefly, to find the cause."""
    outcomes: dict[int, tuple[str, Any]] = {}
    deadline = math.inf
    first_s = 0.0
    while len(outcomes) < len(processes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
        timeout = None
        if deadline < math.inf:
            timeout = max(deadline - time.monotonic(), 0)
        ready: list[Any] = wait(list(pending), timeout)
        if not ready:
            break
        for pipe in ready:
            rank = pending[pipe]
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                processes[rank].join(GRACE_S)
                outcomes[rank] = ("died", processes[rank].exitcode)
            kind = outcomes[rank][0]
            if kind not in FINE:
                first_s = first_s or time.time()
                grace_s = GRACE_S
                if kind == "died" and not asked:
                    grace_s = _SETTLE_S
                deadline = min(deadline, time.monotonic() + grace_s)
    failures = {rank: outcome for rank, outcome in outcomes.items() if outcome[0] not in FINE}
    if failures or len(outcomes) < len(processes):
        if asked and all(kind in ("died", "later") for kind, _ in failures.values()):
            raise leaving(asked)  # their time was up
        problem = _failure(failures, place)
        if isinstance(problem, LaunchError):
            problem.time_s = first_s
        raise problem
    return [outcomes[rank] for rank in range(len(processes))]


def _failure(failures: dict[int, tuple[str, Any]], place: Path) -> PipefitError:
    """The error of the rank that failed first: one that died, refused or raised before one that lost its peer."""
    first = min(place.glob("rank-*.hang"), key=lambda path: path.stat().st_mtime, default=None)
    if first is not None:
        said, _, rest = first.read_text(encoding="utf-8").partition("positions of the ranks:\n")
        if ORDER in said:
            return DisagreementError(said.rstrip())
        return LaunchError(
            f"the run hung: {said.rstrip()}\n  all of it: {first}\n{textwrap.indent(rest.rstrip(), '  ')}"
        )
    rank = min(failures, key=lambda rank: (_order(*failures[rank]), rank))
    kind, what = failures[rank]
    if kind == "refused" and isinstance(what, PipefitError):
        return what
    said = what
    if kind == "died":
        name = f"exit code {what}"
        if what and what < 0:
            name = signal.Signals(-what).name
        said = f"the process died ({name})"
    last, began = _last_place(rank, place)
    log = place / f"rank-{rank}.log"
    return LaunchError(f"rank {rank} failed {last}: {said}\n  its log: {log}", began, kind == "failed")


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
