"""`pipefit study`: many trials on few devices, a shard at a time."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from pipefit.cli.answer import Answer, code_of
from pipefit.cli.heartbeat import NEXT_S
from pipefit.cli.models import importable
from pipefit.cli.options import Count, Folder, Json, help_of
from pipefit.study.results import loss_text
from pipefit.study.trial import StudySpec
from pipefit.units import format_seconds

if TYPE_CHECKING:
    from pipefit.study.board import Board
    from pipefit.study.trial import Trial
    from pipefit.study.trial_progress import TrialProgress

_MARKS = {"finished": "done", "stopped": "stopped", "failed": "FAILED", "held": "waits", "waiting": "", "ready": "…"}
_ORDER = {"running": 0, "failed": 1, "ready": 2, "held": 2, "finished": 3, "waiting": 4, "stopped": 5}
"""Priority of the trials in a table without room for all."""


def command(
    file: Annotated[Path, Parameter(help="The study, as TOML.")],
    *,
    workers: Annotated[Count | None, help_of(StudySpec, "workers")] = None,
    policy: Annotated[str | None, help_of(StudySpec, "policy")] = None,
    output: Annotated[Folder, help_of(StudySpec, "output")] = None,
    resume: bool = False,
    json: Json = False,
) -> Answer:
    """Train many trials on few devices, a shard at a time.

    Example: pipefit study examples/study.toml

    The file names a model, its data, and a grid or a list of trials. A free device takes a turn of one shard, by
    default of the trial with the longest remaining time; if a trial fails, the others continue. The command prints the
    makespan, its lower bound, and the gap; the folder holds the results, the timeline and the best weights. Options
    have priority over the file.

    Args:
        resume: Continue from the study's folder.
    """
    from pipefit.study.file import load_study

    spec = load_study(file)
    if not json:
        _say("loading torch …")
    from pipefit.study.execute.study_run import StudyRun

    given: dict[str, Any] = {"workers": workers, "policy": policy}
    if output is not None:
        given["output"] = str(output)
    spec = replace(spec, **{key: value for key, value in given.items() if value is not None})
    spec = replace(spec, trials=tuple(map(_importable, spec.trials)))
    with _observer(quiet=json) as observer:
        run = StudyRun(spec, observer=observer, resume=resume, forked=False)
        result = run.run()
    code = code_of(not result.num_failed)
    if run.stopped_by is not None and result.interrupted:
        code = 128 + run.stopped_by
        hint = f"stopped by {signal.Signals(run.stopped_by).name}; resume with: pipefit study {file} --resume"
        if output is not None:
            hint += f" -o {output}"
        print(f"pipefit study: {hint}", file=sys.stderr)
    return Answer(result.as_dict(), lambda: f"\n{result}", code)


def _importable(trial: Trial) -> Trial:
    """The trial with a model that other processes find."""
    if isinstance(trial.model, str):
        return replace(trial, model=importable(trial.model))
    return trial


@contextlib.contextmanager
def _observer(quiet: bool) -> Iterator[Callable[[Board], None] | None]:
    """Shows the study: a live table in a terminal, lines elsewhere; None under --json."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        from rich.live import Live

        with Live(refresh_per_second=4, transient=True) as live:  # the results' table replaces it
            yield _Table(live)
    else:
        yield _Lines()


class _Lines:
    """Plain lines: each trial's end, the prediction, the progress after every tenth of the steps, and every 5 s."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._tenths = 0
        self._last_s = time.monotonic()

    def __call__(self, board: Board) -> None:
        for line in (*map(_end_of, board.entries), _prediction(board)):
            if line and line not in self._said:
                self._said.add(line)
                _say(line)
        tenths = int(10 * board.done)
        now = time.monotonic()
        is_due = tenths > self._tenths or now - self._last_s >= NEXT_S
        if is_due and not board.is_over:
            self._tenths = tenths
            self._last_s = now
            _say(_standing(board))


def _end_of(entry: TrialProgress) -> str:
    """The end of a trial, in a line; "": it goes on."""
    if not entry.has_ended:
        return ""
    line = f"{entry.name} {entry.status} after {entry.steps} steps"
    if entry.losses:
        line += f", loss {loss_text(entry.last_loss)}"
    if entry.reason:
        line += f": {entry.reason}"
    return line


def _prediction(board: Board) -> str:
    """The predicted makespan, once it is known."""
    found = board.prediction
    if found is None:
        return ""
    return f"predicted: {format_seconds(found.makespan_s)} in all, lower bound {format_seconds(found.bound_s)}"


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a reader that ends does not stop the study
        print(line, flush=True)


def _standing(board: Board) -> str:
    """The progress of a study, in a line."""
    over = sum(entry.has_ended for entry in board.entries)
    parts = [f"{board.done:.0%} of the steps", f"{over} of {len(board.entries)} trials over"]
    scored = [(score, entry.name) for entry in board.entries if (score := _score_of(entry)) < math.inf]
    if scored:
        score, name = min(scored)
        parts.append(f"lowest {name} {loss_text(score)}")
    if board.left_s < float("inf") and not board.is_over:
        parts.append(f"{format_seconds(round(board.left_s, 1))} left")
    return "  ".join(parts)


class _Table:
    """A live table of the trials, drawn at most four times a second."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._last_s = 0.0

    def __call__(self, board: Board) -> None:
        now = time.monotonic()
        if now - self._last_s >= 0.25 or board.is_over:
            self._last_s = now
            # The terminal cuts off the rest of the table: of many trials only the active ones are shown.
            self._live.update(_table(board, most=max(self._live.console.size.height - 7, 3)))


def _table(board: Board, most: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = sorted(board.entries, key=lambda entry: (_ORDER[entry.status], _score_of(entry)))
    shown = sorted(first[:most], key=lambda entry: entry.number)
    below = _standing(board)
    if len(first) > most:
        below += f"  ({len(first) - most} trials more)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=_prediction(board) or None, title_justify="left")
    for head in ("trial", ""):
        table.add_column(head)
    for head in ("step", "loss", "held-out", "left", "device"):
        table.add_column(head, justify="right")
    for entry in shown:
        table.add_row(*_row(board, entry))
    if not any(entry.trial.evaluate for entry in board.entries):
        del table.columns[4]
    return Group(table, Text(below))


def _row(board: Board, entry: TrialProgress) -> list[str]:
    remaining_s = board.remaining_s(entry)
    left = ""
    if not entry.has_ended and remaining_s < math.inf:
        left = format_seconds(round(remaining_s, 1))
    device = ""
    if entry.status == "running":
        device = str(entry.device)
    state = _MARKS.get(entry.status, entry.status)
    losses = map(loss_text, (entry.last_loss, entry.score))
    return [entry.name, state, f"{entry.steps}/{entry.trial.steps}", *losses, left, device]


def _score_of(entry: TrialProgress) -> float:
    """The score of a trial, the lower the better; infinite: it has none, or failed."""
    if entry.score is None or entry.status == "failed":
        return math.inf
    return entry.score
