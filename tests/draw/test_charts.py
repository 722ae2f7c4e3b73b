"""Charts as SVG."""

import re
import sys

import pytest
from matplotlib.colors import rgb2hex

from pipefit.draw import chart
from pipefit.draw.chart import hue
from pipefit.errors import PipefitError


def paths_of(picture: str, hue: str) -> list[list[tuple[float, float]]]:
    """The corners of the shapes that are filled or stroked in a colour."""
    found = re.findall(rf'<path d="([^"]+)"[^>]*(?:fill|stroke): {hue}', picture)
    return [[tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in found]


def test_bars_are_as_high_as_their_values():
    picture = chart({"a": [("x", 10.0), ("y", 20.0)]}, kind="bar")
    first, second, _ = ([y for _, y in corners] for corners in paths_of(picture, rgb2hex(hue(0))))  # then the legend's
    assert max(second) - min(second) == pytest.approx(2 * (max(first) - min(first)))


def test_points_of_a_logarithmic_axis_are_evenly_spaced_when_they_double():
    line = paths_of(chart({"a": [(4, 3.0), (1, 1.0), (2, 2.0)]}, log_x=True), rgb2hex(hue(0)))[0]
    (first, _), (second, _), (third, _) = line
    assert third - second == pytest.approx(second - first)


@pytest.mark.parametrize("count", [8, 14, 28])
def test_no_two_lines_of_a_chart_share_both_dash_and_mark_so_that_hues_are_not_needed(count):
    picture = chart({f"line {n}": [(1, 1.0 + n), (2, 2.0)] for n in range(count)})
    legend = picture[picture.index('<g id="legend_1">') :]
    signs = re.findall(
        r'style="fill: none(; stroke-dasharray: [\d.,]+; stroke-dashoffset: 0|); stroke: .*?<use xlink:href="#(\w+)"',
        legend,
        re.S,
    )
    marks = {name: re.search(rf'<path id="{name}" d="([^"]+)"', picture).group(1) for _, name in signs}
    signs = [(dash, marks[name]) for dash, name in signs]
    assert len(signs) == len(set(signs)) == count


def test_a_line_of_many_points_is_marked_here_and_there():
    points = [(float(x), 1.0 + x) for x in range(500)]
    picture = chart({"a": points, "b": points}).partition('id="legend_1"')[0]
    places = [
        set(re.findall(rf'<use xlink:href="#\w+" x="([\d.]+)" [^>]*fill: {rgb2hex(hue(index))}', picture))
        for index in (0, 1)
    ]
    assert all(5 <= len(line) <= 12 for line in places) and not places[0] & places[1]


def test_a_chart_has_one_ink_that_follows_the_paper():
    picture = chart({"a": [(1, 1.0)]}, title="t")
    assert "fill: currentColor" in picture and "#010203" not in picture
    assert "@media (prefers-color-scheme:dark)" in picture and "<text " in picture


def test_a_chart_without_matplotlib_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipefitError, match=r"pip install 'pipefit\[plot\]'"):
        chart({"a": [(1, 1.0)]})


def test_names_in_charts_are_escaped():
    picture = chart({"<b>": [(1, 1.0)]}, title="<i>", x_label="<u>", y_label="&")
    assert not re.search(r"<[biu]>", picture)


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1, float("nan"))]}])
def test_a_chart_of_nothing_or_of_no_numbers_is_refused(series):
    with pytest.raises(PipefitError, match="chart"):
        chart(series)
