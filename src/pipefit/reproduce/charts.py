"""Pictures, as records say it: a schedule, a chart of figures over several points, or one of its own kind.

    { draw = ["gpipe", 4, 8], title = "…", follow = 4 }
    { chart = "its title", x = "label", y = "label", over = […], lines = { "its name" = { figure = … } }, … }
    { picture = "topology", given = { … } }

A chart's `published` are lines of numbers, and its `courses` give all points of a line. With `values`, the points of
`over` name values of the entry, and it gives the names of the lines through ours and through the published ones. Other
options have the names that `pipefit.draw.chart` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipefit.draw.chart import chart
from pipefit.reproduce.entry import Bench, Make, Picture, Value, shown
from pipefit.reproduce.named_figures import PICTURES
from pipefit.reproduce.ours import Figure, feasible, figure_of, points_of
from pipefit.reproduce.record_parts import Record, number_of, only, without
from pipefit.reproduce.steps import Step, step_of
from pipefit.units import columns

_LOOKS = ("title", "follow")
Line = list[tuple[Any, Any]]
"""Points of a line."""


def picture_of(record: Record, values: Sequence[Value], calls: Record) -> Callable[[Bench], Picture]:
    """The picture that a record describes.

    Args:
        record: describes a picture.
        values: the values of its entry.
        calls: templates of calls by name.
    """
    if "picture" in record:
        return partial(PICTURES[record["picture"]], **record.get("given", {}))
    if "chart" in record:
        return _Chart(record, values, calls)
    step = step_of(without(record, _LOOKS), calls)
    return partial(_drawn, step=step, looks=only(record, _LOOKS))


def _drawn(run: Bench, step: Step, looks: Record) -> Picture:
    drawing = run(step)
    title = looks.get("title", step.command)
    svg = partial(drawing.svg, **looks)
    return Picture(title, svg, drawing.grid(width=120, color=False))


class _Chart:
    """A chart of figures; points without a feasible plan are left out."""

    def __init__(self, record: Record, values: Sequence[Value], calls: Record) -> None:
        self._record = record
        self._labels = _labels(record)
        self._lines: dict[str, list[tuple[Any, Make]]] = {}
        self._published: dict[str, Line] = {}
        self._courses: dict[str, Figure] = {}
        for name, line in record.get("lines", {}).items():
            self._lines[name] = list(points_of(line, record["over"], calls))
        for name, numbers in record.get("published", {}).items():
            points = zip(self._labels, numbers, strict=True)
            self._published[name] = [(x, number_of(y)) for x, y in points]
        for name, line in record.get("courses", {}).items():
            self._courses[name] = figure_of(line, calls)
        if "values" in record:
            self._through(record["values"], values)

    def _through(self, names: Record, values: Sequence[Value]) -> None:
        """Adds the lines through values of the entry."""
        known = {value.name: value for value in values}
        named = [(point["x"], known[point["value"]]) for point in self._record["over"]]
        self._lines[names["ours"]] = [(x, value.make) for x, value in named]
        self._published[names["published"]] = [(x, value.published) for x, value in named]

    def __call__(self, run: Bench) -> Picture:
        """Draws it."""
        record = self._record
        title = record["chart"]
        x_label = record["x"]
        y_label = record["y"]
        series = self._series(run)
        rows = columns(self._rows(series), right=True)
        options = only(record, ("kind", "log_x"))
        svg = partial(chart, series, title=title, x_label=x_label, y_label=y_label, **options)
        return Picture(title, svg, "\n".join([f"{title} ({y_label})", *rows]))

    def _series(self, run: Bench) -> dict[str, Line]:
        series = {}
        for name, points in self._lines.items():
            found = feasible(run, points)
            series[name] = [(x, float(y)) for x, y in found]
        for name, line in self._published.items():
            series[f"{name}, published"] = line
        for name, course in self._courses.items():
            series[name] = course(run)
        return {name: line for name, line in series.items() if line}

    def _rows(self, series: Mapping[str, Line]) -> list[list[str]]:
        lines = [dict(line) for line in series.values()]
        labels = self._labels or sorted(set().union(*lines))
        rows = [[self._record["x"], *series]]
        for x in labels:
            cells = [_cell(line, x) for line in lines]
            rows.append([shown(x), *cells])
        return rows


def _labels(record: Record) -> list[Any]:
    labels = []
    for point in record.get("over", ()):
        labels.append(point["x"] if isinstance(point, dict) else point)
    return labels


def _cell(line: Mapping[Any, Any], x: Any) -> str:
    if x in line:
        return shown(line[x])
    return ""
