"""A run's folder as one self-contained HTML page: loss, plan, predicted next to measured, both timelines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from pipefit.draw import chart, svg
from pipefit.draw.chart import can_plot
from pipefit.errors import PipefitError
from pipefit.pipeline.run_report import SHOWN
from pipefit.planner.explain import spill_lines
from pipefit.runtime.faults import described
from pipefit.spec import Plan
from pipefit.spec.files import read_json, read_text, said, write_atomically
from pipefit.timeline.trace import load_trace
from pipefit.units import format_bytes, format_seconds


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Writes the page of a run of `pipefit train -o folder`.

    Args:
        folder: of the run.
        output: path of the page; None: `folder/report.html`.

    Raises:
        PipefitError: it is not the folder of a run.
    """
    place = Path(folder)
    if not place.is_dir():
        raise PipefitError(f"{place}: expected the folder of a run (pipefit train -o FOLDER), got no folder")
    data = read_json(place / "run.json")
    if not isinstance(data, dict) or data.get("format") != "pipefit.run/1":
        raise PipefitError(f'{place / "run.json"}: expected "format": "pipefit.run/1"; is this the folder of a run?')
    try:
        page = _render(place, data)
    except (KeyError, IndexError, TypeError, AttributeError, jinja2.UndefinedError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise PipefitError(f"{place}: its files are not those that a run wrote ({why}); train again") from None
    return write_atomically(Path(output) if output else place / "report.html", page)


def _render(place: Path, data: dict[str, Any]) -> str:
    template = files("pipefit.run").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    result, plan = data["result"], Plan.load(place / "plan.json")
    measured, predicted = load_trace(place / "measured.trace.json"), load_trace(place / "predicted.trace.json")
    return environment.from_string(template).render(
        config=data["config"],
        result=result,
        plan=plan,
        spill=spill_lines(plan),
        faults=described(result.get("faults", [])),
        rows=[row for row in result["rows"] if row["name"].split()[0] in ("period", "bubble", *SHOWN)],
        loss=_loss_chart(place, result) if can_plot() else "",
        measured=svg(measured, title="measured", seconds=True),
        predicted=svg(predicted, title="predicted", seconds=True),
    )


def _loss_chart(place: Path, result: dict[str, Any]) -> str:
    path = place / "metrics.jsonl"
    entries = [_entry(line, f"{path}:{number}") for number, line in enumerate(read_text(path).splitlines(), 1)]
    points = [(entry.step, entry.loss) for entry in entries if entry.loss is not None]
    if not points:
        raise PipefitError(f"{path}: expected the loss of at least one step, got none")
    series = {"training loss": points}
    held_out = [(entry.step, entry.held_out_loss) for entry in entries if entry.held_out_loss is not None]
    if held_out:
        series["held-out loss"] = held_out
    if result["baseline"]:
        name, value = result["baseline"]
        series[name] = [(points[0][0], value), (points[-1][0], value)]
    return chart(series, title="Loss", x_label="step", y_label="nats")


class _Entry(msgspec.Struct):
    """The figures of a step that are drawn."""

    step: int
    loss: float | None = None
    held_out_loss: float | None = None


def _entry(line: str, where: str) -> _Entry:
    try:
        return msgspec.json.decode(line, type=_Entry)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise PipefitError(f"{where}: {said(problem)}") from None
