"""Curves of a run from its metrics file: loss, learning rate, norm of the gradients, throughput, memory."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipefit.draw import chart
from pipefit.draw.chart import Points
from pipefit.errors import PipefitError
from pipefit.runtime.faults import Event
from pipefit.spec.files import JsonObject, read_text

_WIDTH = 380
_HEIGHT = 250
_MOST_POINTS = 400
_MIB = 2.0**20
_CURVES = (
    ("Loss", "nats", {"loss": "training", "held_out_loss": "held out"}, 1.0),
    ("Learning rate", "", {"learning_rates": ""}, 1.0),
    ("Gradient norm", "before clipping", {"gradient_norm": ""}, 1.0),
    ("Throughput", "samples/s", {"samples_per_s": ""}, 1.0),
    ("Bubble", "% of the step", {"bubble": ""}, 0.01),
    ("Peak memory", "MiB", {"memory_bytes": "process"}, _MIB),
)
"""Title, unit, the figures and their names in the legend, and the factor of the unit."""


def figures_of(path: Path) -> list[JsonObject]:
    """The lines of a metrics file; a last line that is being written is left out.

    Raises:
        PipefitError: with the number of a line that is no object with a step.
    """
    found = []
    for number, line in enumerate(read_text(path).splitlines(keepends=True), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as problem:
            if not line.endswith("\n"):
                break
            raise PipefitError(f"{path}:{number}: not JSON: {problem}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise PipefitError(f"{path}:{number}: expected an object with a step, got {line.strip()[:60]}")
        for name in ("loss", "held_out_loss"):
            if not isinstance(entry.get(name), int | float | None):
                raise PipefitError(f"{path}:{number}: {name}: expected a number, got {str(entry[name])[:60]!r}")
        found.append(entry)
    return found


def curves(entries: Sequence[JsonObject], baseline: Sequence[Any] | None, events: Sequence[Event] = ()) -> list[str]:
    """The charts of a run, each as SVG text, for the figures that it has.

    Args:
        entries: the entries of `figures_of`.
        baseline: name and value of a loss to compare with.
        events: faults and moves, which are marked at their steps.
    """
    found = []
    marks: dict[str, list[float]] = {}
    for event in events:
        if event.step is not None:
            marks.setdefault(event.kind, []).append(event.step + 0.5)
    for title, unit, names, factor in _CURVES:
        series: dict[str, Points] = {}
        for name, words in names.items():
            series |= _series(entries, name, words or title.lower(), factor)
        if title == "Loss" and series and baseline:
            places = [x for points in series.values() for x, _ in points]
            series[str(baseline[0])] = [(edge(places), float(baseline[1])) for edge in (min, max)]
        if series:
            drawn = chart(series, marks=marks, title=title, x_label="step", y_label=unit, width=_WIDTH, height=_HEIGHT)
            found.append(drawn)
    return found


def _series(entries: Sequence[JsonObject], name: str, words: str, factor: float) -> dict[str, Points]:
    """The finite values of a figure by step; a list has a series for each of its places that differs from the first."""
    places: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for entry in entries:
        values = entry.get(name)
        if values is None:
            continue
        if not isinstance(values, list):
            values = [values]
        for place, value in enumerate(values):
            if math.isfinite(value):
                places[place].append((entry["step"], value / factor))
    found: dict[str, Points] = {}
    for place, points in sorted(places.items()):
        series = _fewer(points)
        label = words
        if place or name == "memory_bytes":
            label = f"{words} {place}"
        if series not in found.values():
            found[label] = series
    return found


def _fewer(points: list[tuple[int, float]]) -> Points:
    """The points, or means of so many consecutive ones that a curve has at most 400."""
    many = -(-len(points) // _MOST_POINTS)
    found = []
    for first in range(0, len(points), many):
        steps, values = zip(*points[first : first + many], strict=True)
        found.append((steps[-1], fmean(values)))
    return found
