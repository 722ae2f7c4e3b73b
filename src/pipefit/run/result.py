"""The result of a run: its figures, and the folder of its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipefit.cost import CostModel
from pipefit.ir import text as program_text
from pipefit.models import ModelBundle
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.run_report import Traffic
from pipefit.run.config import RunConfig, checkpoints_of
from pipefit.run.guesses import Guess
from pipefit.run.sources import Source
from pipefit.spec import Plan, Prediction, Profile
from pipefit.spec.files import JsonObject, write_atomically, write_json
from pipefit.spec.options import as_flat
from pipefit.timeline import Timeline, save_trace
from pipefit.timeline.compare import Row

METRICS = "metrics.jsonl"
"""The figures of every step, written as soon as they are known: a killed run loses at most the last ones."""
MEASURED = "measured.trace.json"
"""The timeline of the last measured passes, written while the run lasts and at its end."""
RESULT = "run.json"
"""The options and the result, written at the end."""


class MeasuredCosts(NamedTuple):
    """Measurements of a run before its first step.

    Attributes:
        profile: of the layers, at the size of its micro-batches.
        cost: of its operations on these ranks.
        cores_of_others: that other programs took meanwhile, so that the run was slower than it will be without them.
    """

    profile: Profile
    cost: CostModel
    cores_of_others: float = 0.0


@dataclass(frozen=True)
class ReadyRun:
    """A run before its first step.

    Attributes:
        config: its options.
        bundle: the model.
        source: the data.
        plan: with its prediction on this machine, if it was measured.
        costs: measured here; None: nothing was measured.
        pipe: the pipeline.
    """

    config: RunConfig
    bundle: ModelBundle
    source: Source
    plan: Plan
    costs: MeasuredCosts | None
    pipe: Pipeline


@dataclass(frozen=True)
class Sample:
    """A text that the trained model has written.

    Attributes:
        prompt: the beginning of a held-out sequence.
        target: what follows there.
        answer: of the model.
    """

    prompt: str
    target: str
    answer: str


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
    held_out_metrics: dict[str, float]
    predicted: Prediction | None
    measured_period_s: float
    bubble: float
    utilisation: list[float]
    peak_memory_bytes: list[float]
    traffic: Traffic
    held_bytes: list[float] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    faults: list[JsonObject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


def write_folder(run: ReadyRun, timelines: dict[str, Timeline], result: RunResult) -> None:
    """Writes plan, profile, program, timelines and pictures of a run, and the result with the paths of all of them.

    Args:
        run: the run.
        timelines: of its last steps: "measured", and "predicted" where its costs were measured.
        result: of the run.
    """
    folder = Path(run.config.output)
    run.plan.save(folder / "plan.json")
    if run.costs is not None:
        run.costs.profile.save(folder / "profile.json")
    program_text.save(run.pipe.program, folder / "program.pipe")
    for name, timeline in timelines.items():
        save_trace(timeline, folder / f"{name}.trace.json")
    result.paths |= _pictures(folder, run.config.model, timelines)
    result.paths |= {"checkpoint": str(checkpoints_of(folder)), "metrics": str(folder / METRICS)}
    data = {"format": "pipefit.run/1", "config": as_flat(run.config), "result": _plain(result)}
    write_json(folder / RESULT, data)


def _pictures(folder: Path, model: str, timelines: dict[str, Timeline]) -> dict[str, str]:
    from pipefit.draw import save
    from pipefit.draw.page import html

    for name, timeline in timelines.items():
        save(timeline, folder / f"{name}.svg")
    write_atomically(folder / "timeline.html", html(timelines, title=f"{folder.resolve().name}: {model}"))
    names = {"picture": "measured.svg", "page": "timeline.html", "trace": MEASURED}
    return {name: str(folder / file) for name, file in names.items()}


def _plain(result: RunResult) -> JsonObject:
    """The result as JSON data, without the errors of rows: they follow from its figures, and may be infinite."""
    data: JsonObject = msgspec.to_builtins(asdict(result))
    data["rows"] = [{key: value for key, value in row._asdict().items() if key != "error"} for row in result.rows]
    return data
