"""Loggers: callbacks that write the figures of a training to files. Only rank 0 writes."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically

if TYPE_CHECKING:
    from pipefit.pipeline.callbacks import Record

_OF_A_STEP = "loss seconds learning_rates gradient_norm samples_per_s tokens_per_s bubble memory_bytes".split()
_COLUMNS = ["step", *_OF_A_STEP, "held_out_loss"]

Write = Callable[[int, Mapping[str, Any]], Any]
"""Writes the figures of a step by name: numbers, and tuples of numbers."""


class Logger:
    """A callback that passes the figures of steps and evaluations to a writer.

    Args:
        begin: from the number of the first step to a writer; when a training resumes it is more than 1.
        place: of the files.
    """

    def __init__(self, begin: Callable[[int], Write], place: Path) -> None:
        self._begin, self.place = begin, place
        self._write: Write | None = None

    def begin(self, step: int) -> None:
        """Removes the figures of a step and later ones, which an earlier run has left."""
        self._add(step, None)

    def step(self, record: Record) -> None:
        """Writes the known figures of a step."""
        figures = {name: getattr(record, name) for name in _OF_A_STEP}
        self._add(record.step, {name: value for name, value in figures.items() if value is not None and value != ()})

    def evaluation(self, record: Record) -> None:
        """Writes the loss of an evaluation."""
        self._add(record.step, {"held_out_loss": record.held_out_loss})

    def _add(self, step: int, figures: Mapping[str, Any] | None) -> None:
        from pipefit.runtime.session import current

        if current().rank == 0:
            try:
                self._write = self._write or self._begin(step)
                if figures is not None:
                    self._write(step, figures)
            except (OSError, ValueError) as problem:
                why = getattr(problem, "strerror", None) or problem
                raise PipefitError(f"{self.place}: cannot be written: {why}") from None


def json_log(path: str | Path) -> Logger:
    """A logger that writes a line of JSON for each step, and one for each evaluation."""

    def line(step: int, figures: Mapping[str, Any]) -> str:
        return json.dumps({"step": step, **figures}) + "\n"

    return _lines(Path(path), line, lambda line: int(json.loads(line)["step"]))


def csv_log(path: str | Path) -> Logger:
    """A logger that writes a CSV table with a row for each step, and one for each evaluation."""

    def line(step: int, figures: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, _COLUMNS, lineterminator="\n").writerow({"step": step, **_numbers(figures)})
        return text.getvalue()

    return _lines(Path(path), line, lambda line: int(line.split(",")[0]), ",".join(_COLUMNS) + "\n")


def _lines(
    path: Path, line_of: Callable[[int, Mapping[str, Any]], str], step_of: Callable[[str], int], header: str = ""
) -> Logger:
    """A logger that adds a line to a file; complete lines of earlier steps stay, others are removed."""

    def begin(first: int) -> Write:
        before = path.read_text(encoding="utf-8").removeprefix(header) if path.exists() else ""
        lines = [line for line in before.splitlines(keepends=True) if line.endswith("\n")]
        write_atomically(path, header + "".join(line for line in lines if step_of(line) < first))

        def write(step: int, figures: Mapping[str, Any]) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(line_of(step, figures))

        return write

    return Logger(begin, path)


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
        run = wandb.init(**{"dir": str(place), "mode": os.environ.get("WANDB_MODE", "offline"), **settings})
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
    return tensorboard_log(folder / "tensorboard") if name == "tensorboard" else wandb_log(folder)


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures as single numbers: of a tuple the largest."""
    return {name: max(value) if isinstance(value, tuple) else value for name, value in figures.items()}
