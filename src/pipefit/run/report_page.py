"""A run's folder as one self-contained HTML page: curves, plan, predicted next to measured, both timelines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from pipefit.draw import svg
from pipefit.draw.chart import can_plot
from pipefit.draw.scene import scene_of
from pipefit.errors import PipefitError
from pipefit.pipeline.run_report import SHOWN
from pipefit.planner.explain import spill_lines
from pipefit.run.config import checkpoints_of
from pipefit.run.curves import curves, figures_of
from pipefit.run.result import MEASURED, METRICS, RESULT
from pipefit.runtime.faults import described, noted
from pipefit.spec import Plan
from pipefit.spec.files import read_json, write_atomically
from pipefit.timeline.compare import Row, notable
from pipefit.timeline.trace import load_trace
from pipefit.units import format_bytes, format_seconds


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Writes the page of a run of `pipefit train -o folder`, also of one that has not ended.

    Args:
        folder: the folder of the run.
        output: path of the page; None: `folder/report.html`.

    Raises:
        PipefitError: it is not the folder of a run.
    """
    place = Path(folder)
    check_folder(place)
    if not (place / METRICS).exists():
        # Names the file that a run writes first of those that a page needs.
        read_json(place / RESULT)
    return write_atomically(Path(output) if output else place / "report.html", page_of(place))


def check_folder(place: Path) -> None:
    """Checks that there is a folder.

    Raises:
        PipefitError: there is none.
    """
    if not place.is_dir():
        raise PipefitError(f"{place}: expected the folder of a run (pipefit train -o FOLDER), got no folder")


def page_of(place: Path, *, follows: bool = False) -> str:
    """The page of a run's folder.

    Args:
        place: the folder.
        follows: whether the page loads itself again while the run lasts.

    Raises:
        PipefitError: its files are not those that a run wrote.
    """
    is_done = (place / RESULT).exists()
    if is_done:
        data = read_json(place / RESULT)
    else:
        data = {}
    if not isinstance(data, dict) or (is_done and data.get("format") != "pipefit.run/1"):
        raise PipefitError(f'{place / RESULT}: expected "format": "pipefit.run/1"; is this the folder of a run?')
    try:
        return _render(place, data, follows)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        jinja2.UndefinedError,
    ) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise PipefitError(f"{place}: its files are not those that a run wrote ({why}); train again") from None


def _render(place: Path, data: dict[str, Any], follows: bool) -> str:
    template = files("pipefit.run").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    if data:
        result = data["result"]
    else:
        result = None
    if result or (place / METRICS).exists():
        entries = figures_of(place / METRICS)
    else:
        entries = []
    if result and not any("loss" in entry for entry in entries):
        raise PipefitError(f"{place / METRICS}: expected the loss of at least one step, got none")
    if result:
        plan = Plan.load(place / "plan.json")
    else:
        plan = None
    drawn: list[Any] = []
    if can_plot():
        drawn = curves(entries, result["baseline"] if result else None)
    return environment.from_string(template).render(
        name=place.resolve().name,
        follows=follows,
        config=data.get("config"),
        result=result,
        last=next((entry for entry in reversed(entries) if "loss" in entry), None),
        plan=plan,
        spill=spill_lines(plan) if plan else [],
        faults=described(result.get("faults", []) if result else noted(checkpoints_of(place))),
        rows=_rows(result["rows"]) if result else [],
        can_plot=can_plot(),
        curves=drawn,
        timelines=_timelines(place, bool(result and result["predicted"])),
    )


def _rows(data: list[dict[str, Any]]) -> list[Row]:
    """The rows of the table of predicted and measured times."""
    rows = [Row(**{"error": 0.0, **row}) for row in data]
    return [row for row in notable(rows) if row.name.split()[0] in ("period", "bubble", *SHOWN)]


def _timelines(place: Path, is_predicted: bool) -> list[str]:
    """The pictures of the timelines that there are, with one unit."""
    names = ["measured"]
    if is_predicted:
        names.append("predicted")
    paths = {name: place / f"{name}.trace.json" for name in names}
    if not is_predicted and not (place / MEASURED).exists():
        return []
    loaded = {name: load_trace(path) for name, path in paths.items()}
    longest = max(timeline.makespan_s for timeline in loaded.values())
    return [svg(scene_of(timeline, True, longest), title=name) for name, timeline in loaded.items()]
