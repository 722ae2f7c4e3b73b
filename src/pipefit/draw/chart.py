"""Plain charts for comparisons: lines or bars over one axis, as SVG.

A hue does not identify a line: there are eight, and some readers see fewer. So each line also has a mark, and after
seven of them a dash, which no other line of the chart shares; its name at the right shows all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Literal

from pipefit.draw.axes import label_number, nice_ticks
from pipefit.draw.look import INKS
from pipefit.errors import PipefitError

Series = Mapping[str, Sequence[tuple[float | str, float]]]

# Eight hues that the common colour blindnesses keep apart (after Okabe and Ito), for light and for dark paper.
HUES = (
    ("#0072b2", "#56a8e0"), ("#d55e00", "#ff8f45"), ("#009e73", "#2fc79a"), ("#b0568f", "#e08fc2"),
    ("#8a6d00", "#e0b93a"), ("#4b4f8f", "#9aa0ee"), ("#5a6675", "#aab6c5"), ("#7a2e2e", "#d98080"),
)  # fmt: skip
# Corners of the marks, in parts of their radius; the first is a circle.
_MARKS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.3), (1.15, 0), (0, 1.3), (-1.15, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    ((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4),
     (0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
    ((0, -0.55), (0.6, -1.15), (1.15, -0.6), (0.55, 0), (1.15, 0.6), (0.6, 1.15),
     (0, 0.55), (-0.6, 1.15), (-1.15, 0.6), (-0.55, 0), (-1.15, -0.6), (-0.6, -1.15)),
)  # fmt: skip
_DASHES = ("", "8 4", "2 4", "10 4 2 4")
_RADIUS = 4.0
_SAMPLE = 30  # pixels of a line's sample next to its name
_LEFT, _TOP, _BOTTOM, _MARGIN = 64, 64, 52, 24
_MOST_LABELS, _MOST_MARKS = 16, 40  # beyond these, places get round numbers, and lines a mark only here and there


def chart(
    series: Series,
    *,
    kind: Literal["line", "bar"] = "line",
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    width: int = 760,
    height: int = 400,
) -> str:
    """A chart of one or several series as SVG text.

    >>> chart({"1f1b": [(4, 10.0), (8, 12.5)]}, x_label="micro-batches", y_label="samples/s").startswith("<svg")
    True

    Args:
        series: for each name, its points (x, y). Texts as x are categories in the order they come.
        kind: lines with points, or bars side by side.
        title: above it.
        x_label: under the axis, with its unit.
        y_label: above the axis, with its unit.
        log_x: x grows by factors; only for numbers above 0.
        width: of the picture, in pixels.
        height: likewise.

    Raises:
        PipefitError: no points, a value that is no finite number, or x ≤ 0 under `log_x`.
    """
    _check(series, log_x)
    places = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    by_category = kind == "bar" or any(isinstance(x, str) for x in places)
    if not by_category:
        places.sort(key=float)
    plot = _Plot(places, by_category, log_x, _highest(series), width, height, max(len(name) for name in series))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipefit-chart" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title or y_label)}">',
        f"<title>{escape(title or y_label)}</title><style>{_style(len(series))}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="ink name" x="{_MARGIN}" y="30">{escape(title)}</text>',
        f'<text class="soft" x="{_MARGIN}" y="{_TOP - 14 if title else 30}">{escape(y_label)}</text>',
        *_axes(plot, x_label),
    ]
    for index, (name, points) in enumerate(series.items()):
        parts += (_bars if kind == "bar" else _line)(plot, index, len(series), name, points)
    parts += _names(plot, series, kind)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Plot:
    """Places of values, in pixels."""

    def __init__(
        self, places: list[float | str], by_category: bool, log_x: bool, top: float, width: int, height: int, name: int
    ) -> None:
        self.places, self.by_category, self.log_x, self.width = places, by_category, log_x, width
        self.right = width - _MARGIN - min(6.6 * name + 24 + _SAMPLE, 250)
        self.bottom = height - _BOTTOM
        self.ticks = nice_ticks(0, top, 5)
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else top
        while self.ticks[-1] < top * (1 - 1e-9):
            self.ticks.append(self.ticks[-1] + step)
        self.top_value = self.ticks[-1] or 1.0

    @property
    def slot(self) -> float:
        """Pixels of a category."""
        return (self.right - _LEFT) / max(len(self.places), 1)

    def x(self, value: float | str) -> float:
        if self.by_category:
            return _LEFT + (self.places.index(value) + 0.5) * self.slot
        scale = math.log if self.log_x else float
        first, last, at = (scale(float(v)) for v in (self.places[0], self.places[-1], value))
        share = (at - first) / (last - first) if last > first else 0.5
        return _LEFT + 14 + share * (self.right - _LEFT - 28)

    def y(self, value: float) -> float:
        return self.bottom - value / self.top_value * (self.bottom - _TOP)


def _check(series: Series, log_x: bool) -> None:
    values = [(name, x, y) for name, points in series.items() for x, y in points]
    if not values:
        raise PipefitError("a chart needs at least one point, got none")
    for name, x, y in values:
        if not math.isfinite(y) or y < 0 or (not isinstance(x, str) and not math.isfinite(x)):
            raise PipefitError(f"chart: {name}: expected finite numbers, heights of at least 0; got ({x}, {y})")
        if log_x and (isinstance(x, str) or x <= 0):
            raise PipefitError(f"chart: {name}: a logarithmic axis needs x above 0, got {x!r}")


def _highest(series: Series) -> float:
    return max(y for points in series.values() for _, y in points) or 1.0


def _axes(plot: _Plot, x_label: str) -> list[str]:
    parts = []
    for tick in plot.ticks:
        y = plot.y(tick)
        parts.append(f'<path class="hair" d="M{_LEFT} {y:.1f}H{plot.right:.1f}"/>')
        parts.append(f'<text class="soft end" x="{_LEFT - 10}" y="{y + 4:.1f}">{label_number(tick)}</text>')
    for place in _labelled(plot):
        words = place if isinstance(place, str) else label_number(place)
        x = plot.x(place)
        parts.append(f'<text class="soft mid" x="{x:.1f}" y="{plot.bottom + 18:.1f}">{escape(words)}</text>')
    middle = (_LEFT + plot.right) / 2
    parts.append(f'<text class="soft mid" x="{middle:.1f}" y="{plot.bottom + 40:.1f}">{escape(x_label)}</text>')
    return parts


def _labelled(plot: _Plot) -> list[float | str]:
    """The places that get a word under the axis: all when they are few, round numbers when they are many."""
    if len(plot.places) <= _MOST_LABELS or plot.by_category or plot.log_x:
        return plot.places
    return [*nice_ticks(float(plot.places[0]), float(plot.places[-1]), _MOST_LABELS // 2)]


def _line(plot: _Plot, index: int, count: int, name: str, points: Sequence[tuple[float | str, float]]) -> list[str]:
    placed = sorted((plot.x(x), plot.y(y), x, y) for x, y in points)
    parts = [_stroke(index, "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in placed))] if len(placed) > 1 else []
    # Of many points a few are marked, on each line others: lines that run together stay apart.
    every = 1 if len(placed) <= _MOST_MARKS else len(placed) // 10
    for x, y, at, value in placed[index * every // count :: every]:
        words = f"{name}: {at if isinstance(at, str) else label_number(at)}, {label_number(value)}"
        parts.append(_mark(index, x, y, f"<title>{escape(words)}</title>"))
    return parts


def _stroke(index: int, path: str) -> str:
    dash = _DASHES[index // len(_MARKS) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="line c{index % len(HUES)}"{dashed} d="M{path}"/>'


def _mark(index: int, x: float, y: float, title: str = "") -> str:
    corners, hue = _MARKS[index % len(_MARKS)], index % len(HUES)
    if not corners:
        return f'<circle class="mark f{hue}" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}">{title}</circle>'
    path = "L".join(f"{x + dx * _RADIUS:.1f} {y + dy * _RADIUS:.1f}" for dx, dy in corners)
    return f'<path class="mark f{hue}" d="M{path}Z">{title}</path>'


def _bars(plot: _Plot, index: int, count: int, name: str, points: Sequence[tuple[float | str, float]]) -> list[str]:
    wide = 0.78 * plot.slot / count
    parts = []
    for at, value in points:
        x, y = plot.x(at) - 0.39 * plot.slot + index * wide, plot.y(value)
        words = f"{name}: {at if isinstance(at, str) else label_number(at)}, {label_number(value)}"
        parts.append(
            f'<rect class="f{index % len(HUES)}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(wide - 1, 0.5):.1f}" '
            f'height="{plot.bottom - y:.1f}" rx="1.5"><title>{escape(words)}</title></rect>'
        )
        parts += _stripes(index, x + 0.5, y, max(wide - 1, 0.5), plot.bottom)
        if wide >= 26:
            parts.append(f'<text class="ink mid" x="{x + wide / 2:.1f}" y="{y - 5:.1f}">{label_number(value)}</text>')
    return parts


def _stripes(index: int, x: float, top: float, wide: float, bottom: float) -> list[str]:
    """Gaps in a bar whose hue was there before."""
    gap = 9 / (index // len(HUES)) if index >= len(HUES) else 0
    rows = range(1, math.ceil((bottom - top) / gap)) if gap else ()
    return [f'<path class="gap" d="M{x:.1f} {bottom - row * gap:.1f}H{x + wide:.1f}"/>' for row in rows]


def _names(plot: _Plot, series: Series, kind: str) -> list[str]:
    """Each name next to the end of its line, moved apart where lines end together; for bars from the top down."""
    ends = [
        _TOP + 6.0 + 20 * index if kind == "bar" else plot.y(max(points, key=lambda point: plot.x(point[0]))[1])
        for index, points in enumerate(series.values())
        if points
    ]
    order = sorted(range(len(ends)), key=ends.__getitem__)
    pitch = min(17.0, (plot.bottom - _TOP) / max(len(ends) - 1, 1))
    for before, after in pairwise(order):
        ends[after] = max(ends[after], ends[before] + pitch)
    overflow = max(ends, default=0.0) - plot.bottom
    for place, index in enumerate(reversed(order)):
        ends[index] = min(ends[index], plot.bottom - pitch * place) if overflow > 0 else ends[index]
    parts, x = [], plot.right + 12
    for index, (name, points) in enumerate(series.items()):
        if not points:
            continue
        y = ends.pop(0)
        if kind == "bar":
            parts.append(f'<rect class="f{index % len(HUES)}" x="{x:.1f}" y="{y - 6:.1f}" width="12" height="12"/>')
            parts += _stripes(index, x, y - 6, 12, y + 6)
        else:
            parts += [_stroke(index, f"{x:.1f} {y:.1f}H{x + _SAMPLE:.1f}"), _mark(index, x + _SAMPLE / 2, y)]
        words = x + (18 if kind == "bar" else _SAMPLE + 7)
        parts.append(f'<text class="ink" x="{words:.1f}" y="{y + 4:.1f}">{escape(name)}</text>')
    return parts


def _style(count: int) -> str:
    root = ".pipefit-chart"
    base = (
        f"{root}{{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;"
        f"font-variant-numeric:tabular-nums}}"
        f"{root} .name{{font-size:17px;font-weight:650}}{root} .end{{text-anchor:end}}{root} .mid{{text-anchor:middle}}"
        f"{root} .line{{fill:none;stroke-width:2;stroke-linejoin:round}}{root} .gap{{stroke-width:2}}"
    )
    sheets = []
    for night in (0, 1):
        rules = [f"{root} .{name}{{fill:{INKS[name][night]}}}" for name in ("paper", "ink", "soft")]
        rules.append(f"{root} .hair{{stroke:{INKS['line'][night]}}}")
        # A mark stands out from lines that run through it.
        rules += [f"{root} .{name}{{stroke:{INKS['paper'][night]}}}" for name in ("mark", "gap")]
        for index, hue in enumerate(HUES[:count]):
            rules.append(f"{root} .f{index}{{fill:{hue[night]}}}{root} .c{index}{{stroke:{hue[night]}}}")
        sheets.append("".join(rules))
    return f"{base}{sheets[0]}@media (prefers-color-scheme:dark){{{sheets[1]}}}"
