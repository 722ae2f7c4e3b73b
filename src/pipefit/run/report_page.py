"""A run's folder as one self-contained HTML page: curves, plan, predicted next to measured, both timelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import UndefinedError

from pipefit.draw import svg
from pipefit.draw.chart import can_plot
from pipefit.draw.scene import scene_of
from pipefit.errors import PipefitError
from pipefit.pipeline.run_report import SHOWN
from pipefit.planner.explain import spill_lines
from pipefit.run.config import RunConfig, checkpoints_of
from pipefit.run.curves import curves, figures_of
from pipefit.run.guesses import Guess, picture_of
from pipefit.run.result import MEASURED, METRICS, RESULT
from pipefit.run.speeds import speeds_of
from pipefit.runtime.faults import events_of, noted
from pipefit.spec import Plan
from pipefit.spec.assets import rendered
from pipefit.spec.files import JsonObject, read_json, write_atomically
from pipefit.spec.options import as_flat
from pipefit.timeline import Timeline
from pipefit.timeline.compare import Row, notable
from pipefit.timeline.trace import load_trace
from pipefit.units import format_seconds

_WIDTHS = {"screen": (1160, 2), "phone": (560, 1)}
"""The width of a timeline in pixels and the number of passes that it shows, for each kind of window."""
_SETTINGS = (
    "model",
    "option",
    "data",
    "ranks",
    "schedule",
    "microbatches",
    "batch",
    "steps",
    "optimizer",
    "lr",
    "lr_schedule",
    "warmup",
    "weight_decay",
    "betas",
    "clip",
    "precision",
    "seed",
)
"""The options that a report always names; the others where they are not the default."""


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
    with _of_a_run(place):
        return _render(place, data, follows)


@contextlib.contextmanager
def _of_a_run(place: Path) -> Iterator[None]:
    """The context in which the files of a run's folder are read.

    Raises:
        PipefitError: they are not those that a run wrote.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, UndefinedError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise PipefitError(f"{place}: its files are not those that a run wrote ({why}); train again") from None


def summary_of(place: Path) -> list[tuple[str, str]]:
    """The figures by which a run that has ended is judged, as names and words; []: it has not ended.

    Args:
        place: the folder of the run, of which a page was made.

    Raises:
        PipefitError: a file is not what was written.
    """
    if not (place / RESULT).exists():
        return []
    found = []
    with _of_a_run(place):
        data = read_json(place / RESULT)
        result = data["result"]
        accuracy = result["held_out_accuracy"]
        if accuracy is not None:
            found.append(("result", f"{accuracy:.1%} of the held-out samples are right"))
        if result["predicted"]:
            predicted = format_seconds(result["predicted"]["period_s"])
            found.append(("step", f"{predicted} predicted, {format_seconds(result['measured_period_s'])} measured"))
        speeds = speeds_of(place, data["config"])
        if speeds:
            found += [("speed", speeds.verdict), ("", speeds.method)]
    return found


def _render(place: Path, data: JsonObject, follows: bool) -> str:
    result = None
    if data:
        result = data["result"]
    entries = []
    if result or (place / METRICS).exists():
        entries = figures_of(place / METRICS)
    losses = [entry for entry in entries if "loss" in entry]
    content: dict[str, Any] = dict.fromkeys(("config", "plan", "guesses", "speeds", "settings", "machine"))
    if result:
        if not losses:
            raise PipefitError(f"{place / METRICS}: expected the loss of at least one step, got none")
        content = _of_result(place, data["config"], result)
        baseline = result["baseline"]
        faults = result.get("faults", [])
        is_predicted = bool(result["predicted"])
    else:
        baseline = None
        faults = noted(checkpoints_of(place))
        is_predicted = False
    events = events_of(faults)
    drawn = []
    if can_plot():
        drawn = curves(entries, baseline, events)
    return rendered(
        "pipefit.run",
        "report.html.j2",
        name=place.resolve().name,
        follows=follows,
        result=result,
        last=losses[-1] if losses else None,
        events=events,
        can_plot=can_plot(),
        curves=drawn,
        timelines=_timelines(place, is_predicted),
        **content,
    )


def _of_result(place: Path, config: JsonObject, result: JsonObject) -> JsonObject:
    """The content of the page of a run that has ended, in addition to the content of every page."""
    plan = Plan.load(place / "plan.json")
    return {
        "config": config,
        "plan": plan,
        "spill": spill_lines(plan),
        "rows": _rows(result["rows"]),
        "settings": _settings(config),
        "machine": result.get("machine"),
        "speeds": speeds_of(place, config),
        "guesses": [(guess, picture_of(guess)) for guess in starmap(Guess, result.get("guesses", ()))],
    }


def _rows(data: list[JsonObject]) -> list[Row]:
    """The rows of the table of predicted and measured times."""
    rows = [Row(**{"error": 0.0, **row}) for row in data]
    return [row for row in notable(rows) if row.name.split()[0] in ("period", "bubble", *SHOWN)]


def _settings(config: JsonObject) -> dict[str, str]:
    """The options of a run that a reader wants to know, by their names in words."""
    usual = as_flat(RunConfig())
    found = {}
    for name, value in config.items():
        if name == "output" or value in (None, "", [], {}):
            continue
        if value == usual.get(name) and name not in _SETTINGS:
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        found[name.replace("_", " ")] = str(value)
    return found


def _timelines(place: Path, is_predicted: bool) -> list[tuple[str, str]]:
    """The pictures of the last passes of the timelines that there are, with one unit; each for a kind of window."""
    names = ["measured"]
    if is_predicted:
        names.append("predicted")
    paths = {name: place / f"{name}.trace.json" for name in names}
    if not is_predicted and not (place / MEASURED).exists():
        return []
    loaded = {name: load_trace(path) for name, path in paths.items()}
    found = []
    for name, timeline in loaded.items():
        for window, (width, num_passes) in _WIDTHS.items():
            shown = _last(timeline, num_passes)
            longest = max(_last(other, num_passes).makespan_s for other in loaded.values())
            found.append((window, svg(scene_of(shown, True, longest), title=name, width=width)))
    return found


def _last(timeline: Timeline, num_passes: int) -> Timeline:
    """The last passes of a timeline."""
    first = timeline.num_repeats - num_passes
    if first <= 0:
        return timeline
    events = [
        msgspec.structs.replace(event, repeat=event.repeat - first)
        for event in timeline.events
        if event.repeat >= first
    ]
    return replace(timeline, events=tuple(events), num_repeats=num_passes)
