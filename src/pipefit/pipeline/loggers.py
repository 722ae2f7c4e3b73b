"""Loggers: callbacks that write the figures of a training to files. Only rank 0 writes."""

from __future__ import annotations

import csv
import errno
import importlib.util
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError
from pipefit.spec.arguments import checked
from pipefit.spec.files import JsonObject, write_atomically

if TYPE_CHECKING:
    from pipefit.pipeline.callbacks import Record

_log = logging.getLogger("pipefit.logs")

_OF_A_STEP = "loss seconds learning_rates gradient_norm samples_per_s tokens_per_s bubble memory_bytes".split()
_COLUMNS = ["step", *_OF_A_STEP, "held_out_loss"]
_HELD_OUT = "held_out_"
"""Prefix of the metrics of an evaluation."""

_MOST_UNWRITTEN = 8
"""Steps whose figures a rank keeps that is not the first one."""

Write = Callable[[int, Mapping[str, Any]], Any]
"""Writes the figures of a step by name: numbers, and tuples of numbers."""


class Logger:
    """A callback that passes the figures of steps and evaluations to a writer.

    A log does not decide whether a training lives: figures that cannot be written, as on a full disk, wait for the next
    step, with a warning. Only at the first step of a training a place that cannot be written is refused.

    Args:
        begin: from the number of the first step to a writer; when a training resumes it is more than 1.
        place: of the files.
    """

    def __init__(self, begin: Callable[[int], Write], place: Path) -> None:
        self._begin = begin
        self.place = place
        self._write: Write | None = None
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._is_failing = False

    def begin(self, step: int) -> None:
        """Removes the figures of a step and later ones, which an earlier run has left.

        Raises:
            PipefitError: it cannot be written, and nothing has been.
        """
        from pipefit.runtime.session import current

        if current().rank != 0 or self._write is not None:
            return
        try:
            self._write = self._begin(step)
        except (OSError, ValueError) as problem:
            self._failed(step, problem)

    def step(self, record: Record) -> None:
        """Writes the known figures of a step."""
        figures = {name: getattr(record, name) for name in _OF_A_STEP}
        figures |= record.metrics
        self._add(record.step, {name: value for name, value in figures.items() if value not in (None, ())})

    def evaluation(self, record: Record) -> None:
        """Writes the loss and the metrics of an evaluation."""
        metrics = {_HELD_OUT + name: value for name, value in record.held_out_metrics.items()}
        self._add(record.step, {"held_out_loss": record.held_out_loss, **metrics})

    def _add(self, step: int, figures: Mapping[str, Any]) -> None:
        from pipefit.runtime.session import current

        self._waiting.append((step, figures))
        if current().rank != 0:
            # What rank 0 may not have written yet, if it is lost now. This rank may have been the first.
            self._write = None
            self._waiting = [entry for entry in self._waiting if entry[0] > step - _MOST_UNWRITTEN]
        else:
            self._write_waiting(step)

    def repaired(self, record: Record) -> None:
        """Writes what the rank that was the first one may not have written before it was lost."""
        from pipefit.runtime.session import current

        if current().rank == 0:
            self._write_waiting(record.step)

    def _write_waiting(self, step: int) -> None:
        """Writes the figures that wait, up to those of a step."""
        if self._waiting:
            self.begin(self._waiting[0][0])
        if self._write is None:
            return
        try:
            while self._waiting:
                self._write(*self._waiting[0])
                self._waiting.pop(0)
        except (OSError, ValueError) as problem:
            self._failed(step, problem)
        else:
            self._is_failing = False

    def _failed(self, step: int, problem: Exception) -> None:
        """Warns, once for each time that it cannot be written; refuses a log that cannot even begin."""
        if isinstance(problem, PipefitError):
            reason = str(problem)
        else:
            why = getattr(problem, "strerror", None) or problem
            reason = f"{self.place}: cannot be written: {why}"
        if step == 1:
            raise PipefitError(reason) from None
        if not self._is_failing:
            _log.warning("%s; training goes on, and the figures wait until it can be written", reason)
        self._is_failing = True


@checked()
def json_log(path: str | Path) -> Logger:
    """A logger that writes a line of JSON for each step, and one for each evaluation."""
    place = Path(path)

    def begin(first: int) -> Write:
        before = [entry for entry in entries_of(place) if entry["step"] < first]
        write_atomically(place, "".join(json.dumps(entry) + "\n" for entry in before))

        def write(step: int, figures: Mapping[str, Any]) -> None:
            _append(place, json.dumps({"step": step, **figures}) + "\n")

        return write

    return Logger(begin, place)


@checked()
def csv_log(path: str | Path) -> Logger:
    """A logger that writes a CSV table with a row for each step, and one for each evaluation.

    Metrics of the loss have columns when the first step of the run has them.
    """
    place = Path(path)

    def begin(first: int) -> Write:
        before = []
        for row in csv.DictReader(_whole_lines(place)):
            step = str(row.get("step"))
            if step.isdecimal() and int(step) < first:
                before.append(row)
        columns: list[str] = []

        def write(step: int, figures: Mapping[str, Any]) -> None:
            if not columns:
                names = dict.fromkeys(_COLUMNS)
                for row in (*before, figures):
                    names |= dict.fromkeys(row)
                for name in figures:
                    if name not in _COLUMNS:
                        names[_HELD_OUT + name] = None
                columns.extend(names)
                head = {name: name for name in columns}
                write_atomically(place, _rows(columns, [head, *before]))
            _append(place, _rows(columns, [{"step": step, **_numbers(figures)}]))

        return write

    return Logger(begin, place)


def entries_of(path: Path) -> Iterator[JsonObject]:
    """The entries of a log of lines of JSON, each with its step; damaged lines are left out, with a warning."""
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield entry
        else:
            _log.warning("%s:%d: not the figures of a step; left out", path, number)


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a file, with their ends; none where there is no file."""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        text = ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _append(path: Path, text: str) -> None:
    """Adds text to a file; where not all of it can be written, none of it stays."""
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _rows(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return text.getvalue()


@checked()
def tensorboard_log(folder: str | Path) -> Logger:
    """A logger that writes event files of TensorBoard.

    Raises:
        PipefitError: it is not installed.
    """
    check_installed("tensorboard")
    place = Path(folder)

    def begin(first: int) -> Write:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(place), purge_step=first)

        def write(step: int, figures: Mapping[str, Any]) -> None:
            for name, value in _numbers(figures).items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return write

    return Logger(begin, place)


@checked()
def wandb_log(folder: str | Path, **settings: Any) -> Logger:
    """A logger that writes a run of Weights & Biases: offline, unless WANDB_MODE or `mode` is set.

    Args:
        folder: of its files.
        settings: of `wandb.init`, such as `project`.

    Raises:
        PipefitError: it is not installed.
    """
    check_installed("wandb")
    place = Path(folder)

    def begin(first: int) -> Write:
        import wandb

        place.mkdir(parents=True, exist_ok=True)
        usual = {"dir": str(place), "mode": os.environ.get("WANDB_MODE", "offline")}
        run = wandb.init(**{**usual, **settings})
        return lambda step, figures: run.log(_numbers(figures), step=step)

    return Logger(begin, place)


def check_installed(name: str) -> None:
    """Checks that the package of a logger is installed.

    Raises:
        PipefitError: it is not.
    """
    if name != "csv" and importlib.util.find_spec(name) is None:
        raise PipefitError(f"logging by {name} needs the package {name}: pip install {name}")


def log_named(name: str, folder: Path) -> Logger:
    """The logger of a name on the command line, for a run's folder."""
    if name == "csv":
        return csv_log(folder / "metrics.csv")
    if name == "tensorboard":
        return tensorboard_log(folder / "tensorboard")
    return wandb_log(folder)


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures as single numbers: of a tuple the largest."""
    found = {}
    for name, value in figures.items():
        found[name] = max(value) if isinstance(value, tuple) else value
    return found
