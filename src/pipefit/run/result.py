"""The result of a run: its figures, and the folder of its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipefit.errors import PipefitError
from pipefit.ir import text as program_text
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.run_report import Traffic
from pipefit.run.config import RunConfig
from pipefit.spec import Plan, Prediction, Profile
from pipefit.spec.files import write_atomically, write_json
from pipefit.spec.options import as_flat
from pipefit.timeline import Timeline, save_trace
from pipefit.timeline.compare import Row

METRICS = "metrics.jsonl"
"""The loss of every step, written as soon as it is known: a killed run loses at most the last one."""


@dataclass
class RunResult:
    """The figures of a run; the same on every rank, except paths and rows, which only rank 0 has."""

    losses: list[float]
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    baseline: tuple[str, float] | None
    held_out_loss: float | None
    held_out_accuracy: float | None
    held_out_before: float | None
    predicted: Prediction | None
    measured_period_s: float
    bubble: float
    utilisation: list[float]
    peak_memory_bytes: list[float]
    traffic: Traffic
    held_bytes: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    text: str = ""
    paths: dict[str, str] = field(default_factory=dict)


def checkpoints_of(folder: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(folder) / "checkpoints"


def write_folder(
    config: RunConfig,
    pipe: Pipeline,
    plan: Plan,
    profile: Profile,
    measured: Timeline,
    predicted: Timeline,
    result: RunResult,
) -> None:
    """Writes plan, profile, program, timelines and pictures of a run, and the result with the paths of all of them."""
    folder = Path(config.output)
    plan.save(folder / "plan.json")
    profile.save(folder / "profile.json")
    program_text.save(pipe.program, folder / "program.pipe")
    save_trace(predicted, folder / "predicted.trace.json")
    save_trace(measured, folder / "measured.trace.json")
    result.paths |= _pictures(folder, measured, predicted)
    result.paths |= {"checkpoint": str(checkpoints_of(folder)), "metrics": str(folder / METRICS)}
    write_json(folder / "run.json", {"format": "pipefit.run/1", "config": as_flat(config), "result": _plain(result)})


def _pictures(folder: Path, measured: Timeline, predicted: Timeline) -> dict[str, str]:
    from pipefit.draw import save
    from pipefit.draw.page import html

    save(measured, folder / "measured.svg")
    save(predicted, folder / "predicted.svg")
    write_atomically(folder / "timeline.html", html({"measured": measured, "predicted": predicted}))
    names = {"picture": "measured.svg", "page": "timeline.html", "trace": "measured.trace.json"}
    return {name: str(folder / file) for name, file in names.items()}


def _plain(result: RunResult) -> dict[str, Any]:
    """The result as JSON data, without the errors of rows: they follow from its figures, and may be infinite."""
    data: dict[str, Any] = msgspec.to_builtins(asdict(result))
    data["rows"] = [{key: value for key, value in row._asdict().items() if key != "error"} for row in result.rows]
    return data


@contextlib.contextmanager
def metrics_in(folder: Path | None, done: int) -> Iterator[Callable[..., None]]:
    """Opens a file in a run's folder with a line for each step; returns a function that adds a step's figures by name.

    Args:
        folder: of the run; None: nothing is written.
        done: steps that are done already. A run that resumes in its folder keeps only their lines.

    Raises:
        PipefitError: it cannot be written.
    """
    if folder is None:
        yield lambda step, **figures: None
        return
    path = folder / METRICS
    write_atomically(path, "".join(_before(path, done)))

    def add(step: int, **figures: float) -> None:
        try:
            file.write(json.dumps({"step": step, **figures}) + "\n")
            file.flush()
        except OSError as problem:
            raise PipefitError(f"{path}: cannot be written: {problem.strerror}") from None

    with path.open("a", encoding="utf-8") as file:
        yield add


def _before(path: Path, done: int) -> list[str]:
    """The lines of the steps that are done, without an incomplete last line."""
    if not done or not path.exists():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= done]
