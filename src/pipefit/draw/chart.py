"""Charts by matplotlib, as SVG text with colours that follow the reader's preference for light or dark.

A hue does not identify a line for colour-blind readers. So each line also has a mark, and after seven of them a dash,
which no other line of the chart shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Literal

from pipefit.draw.axes import label_number
from pipefit.draw.look import INKS
from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "a chart needs matplotlib, which is not installed; pip install 'pipefit[plot]'"

Points = Sequence[tuple[float | str, float]]
Series = Mapping[str, Points]

_MARKS = "os^DvPX"
_DASHES = ("-", "--", ":", "-.")
_MOST_LABELS, _MOST_MARKS = 16, 40  # beyond these, bars have no numbers, and lines have a mark only here and there
_NARROW = 500  # pixels of width below which the legend is under the chart
_INK = "#010203"  # placeholder of the ink of both themes until the text is written
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipefit",
    "font.size": 12,
    "figure.titlesize": 16,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.15,
    "figure.constrained_layout.h_pad": 0.12,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
}


def chart(
    series: Series,
    *,
    kind: Literal["line", "bar", "points"] = "line",
    marks: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    width: int = 760,
    height: int = 400,
) -> str:
    """A chart of one or several series as SVG text.

    Args:
        series: the points (x, y) of each name. Texts as x are categories in the order they come.
        kind: lines with points, bars side by side, or points alone.
        marks: places on the x axis with a line across the chart, by their name in the legend.
        title: above it.
        x_label: the words under the axis, with its unit.
        y_label: next to the axis, with its unit.
        log_x: x grows by factors; only for numbers above 0.
        width: the picture's width in pixels.
        height: likewise.

    Raises:
        PipefitError: no points, a value that is not finite, a bar below 0, x ≤ 0 under `log_x`, or no
            matplotlib.
    """
    _check(series, log_x, kind == "bar")

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set(xlabel=x_label, ylabel=y_label)
        if kind == "bar":
            _bars(axes, series)
        else:
            _lines(axes, series, log_x, joined=kind == "line")
        for index, (name, places) in enumerate((marks or {}).items()):
            dashes = _DASHES[1 + index % (len(_DASHES) - 1)]
            for number, place in enumerate(places):
                axes.axvline(place, color=_INK, linestyle=dashes, linewidth=1, label=name if number == 0 else "")
        heights = [0, *(y for points in series.values() for _, y in points)]
        top = 1.05 * max(heights)
        axes.set_ylim(1.05 * min(heights), top or None)
        axes.yaxis.set_major_formatter(lambda value, _: label_number(value))
        if width >= _NARROW:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        elif len(series) > 1 or marks:
            figure.legend(loc="outside lower left", ncols=2)

    return plotted(draw, width, height, title)


def plotted(draw: Callable[[Figure], None], width: int, height: int, title: str) -> str:
    """The SVG text of a figure that a function draws.

    Args:
        draw: called with an empty figure of matplotlib.
        width: the picture's width in pixels.
        height: likewise.
        title: above it.

    Raises:
        PipefitError: matplotlib is not installed.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PipefitError(MISSING) from None
    text = StringIO()
    with style.context(_STYLE, after_reset=True):
        figure = Figure((width / 72, height / 72), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", weight="bold")
        draw(figure)
        unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=unnamed)
    body = text.getvalue().partition("<svg")[2].partition(">")[2]
    light, dark = INKS["ink"]
    paper, night = INKS["paper"]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="pipefit-chart" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>.pipefit-chart{{color:{light};background:{paper};max-width:100%;height:auto}}"
        f"@media (prefers-color-scheme:dark){{.pipefit-chart{{color:{dark};background:{night}}}}}</style>"
        + body.replace(_INK, "currentColor")
    )


def hue(index: int) -> tuple[float, float, float]:
    """A colour for light and dark paper; consecutive ones are a golden angle apart, and of two lightnesses."""
    return hls_to_rgb((index * 0.381966 + 0.57) % 1, (0.46, 0.62)[index % 2], 0.65)


def can_plot() -> bool:
    """Returns whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _check(series: Series, log_x: bool, are_bars: bool) -> None:
    values = [(name, x, y) for name, points in series.items() for x, y in points]
    if not values:
        raise PipefitError("a chart needs at least one point, got none")
    wanted = "finite numbers"
    if are_bars:
        wanted += ", heights of at least 0"
    for name, x, y in values:
        is_finite = math.isfinite(y) and (isinstance(x, str) or math.isfinite(x))
        if not is_finite or (are_bars and y < 0):
            raise PipefitError(f"chart: {name}: expected {wanted}; got ({x}, {y})")
        if log_x and (isinstance(x, str) or x <= 0):
            raise PipefitError(f"chart: {name}: a logarithmic axis needs x above 0, got {x!r}")


def _places(series: Series) -> list[float | str]:
    return list(dict.fromkeys(x for points in series.values() for x, _ in points))


def _words(place: float | str) -> str:
    if isinstance(place, str):
        return place
    return label_number(place)


def _lines(axes: Axes, series: Series, log_x: bool, joined: bool) -> None:
    for index, (name, points) in enumerate(series.items()):
        if not any(isinstance(x, str) for x, _ in points):
            points = sorted(points)
        # Of many points only a few are marked, different ones on each line: so overlapping lines can be distinguished.
        every = 1
        dashes = ""
        size = 4
        if joined:
            round_of_marks = index // len(_MARKS)
            dashes = _DASHES[round_of_marks % len(_DASHES)]
            size = 6
        if joined and len(points) > _MOST_MARKS:
            every = len(points) // 10
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=hue(index),
            marker=_MARKS[index % len(_MARKS)],
            linestyle=dashes,
            markersize=size,
            markevery=(index * every // len(series), every),
        )
    if log_x:
        places = _places(series)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(places, list(map(_words, places)))


def _bars(axes: Axes, series: Series) -> None:
    places = _places(series)
    wide = 0.8 / len(series)
    for index, (name, points) in enumerate(series.items()):
        shift = wide * (index + 0.5) - 0.4
        middles = [places.index(x) + shift for x, _ in points]
        heights = [y for _, y in points]
        bars = axes.bar(middles, heights, 0.94 * wide, label=name, color=hue(index))
        if len(places) * len(series) <= _MOST_LABELS:
            axes.bar_label(bars, list(map(label_number, heights)))
    axes.set_xticks(range(len(places)), list(map(_words, places)))
    axes.grid(axis="x", visible=False)
