"""How values are made, as records say it: a figure of a call, next to other figures or over several points.

A record of one figure:

    { figure = "rate", plan = ["vgg16", "pcie-4"] }          a figure of a call (`pipefit.reproduce.steps.step_of`)
    { figure = "time_to", given = { data = "digits" } }      a figure with further arguments, here without a call
    { figure = "peak_inflight", at = 0, … }                  of a metric of every rank, one; or at = "max"
    { figure = "rate", …, over = { … } }                     a ratio a/b; gain_over: a/b − 1; saved_over: 1 − a/b

In the second record of a ratio only what differs is given. A record of several figures:

    { descends = [{ … }, { … }] }                            each, or each of these records, is larger than the next
    { falls = { …, "{x}" … }, each = [1, 2, 4] }             each at most `limit` (1) times the one before
    { rises = { … }, each = […] }                            each more than `limit` (1) times the one before
    { best = { … }, each = […] }                             the point at which the figure is largest
    { most = { … }, each = […] }                             the largest figure

Points without a feasible plan are left out of the last four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import gt, le, truediv
from typing import Any

from pipefit.errors import InfeasibleError, PipefitError, look_up
from pipefit.reproduce.drawings import metric
from pipefit.reproduce.entry import Bench, Make, Scalar
from pipefit.reproduce.named_figures import FIGURES
from pipefit.reproduce.record_parts import Record, only, without
from pipefit.reproduce.steps import Draw, filled, is_call, step_of

Figure = Callable[[Bench], Any]
"""Computes a figure."""
Ratio = Callable[[float, float], float]
Points = Sequence[tuple[Any, Any]]
"""Figures with their x."""


_RATIOS: Mapping[str, Ratio] = {
    "over": truediv,
    "gain_over": lambda a, b: a / b - 1,
    "saved_over": lambda a, b: 1 - a / b,
}
_OWN = ("figure", "given", "at", *_RATIOS)


def figure_of(record: Record, calls: Record) -> Figure:
    """The figure of a call that a record describes, perhaps related to another.

    Args:
        record: describes one figure.
        calls: templates of calls by name.

    Raises:
        PipefitError: an unknown figure or call.
    """
    name = record["figure"]
    steps = []
    call = without(record, _OWN)
    if call:
        steps.append(step_of(call, calls))
    given = record.get("given", {})
    if name not in FIGURES and any(isinstance(step, Draw) for step in steps):
        function: Callable[..., Any] = metric
        given = {"name": name, "at": record.get("at")}
    else:
        function = look_up(name, FIGURES, "no figure is called")

    def own(run: Bench) -> Any:
        return function(run, *steps, **given)

    for name, ratio in _RATIOS.items():
        if name in record:
            other = figure_of(_related(record, record[name]), calls)
            return partial(_ratio, ratio=ratio, own=own, other=other)
    return own


def _ratio(run: Bench, ratio: Ratio, own: Figure, other: Figure) -> float:
    return ratio(own(run), other(run))


def _related(record: Record, other: Record) -> Record:
    """The second record of a ratio, with all in which it is like the first."""
    same = without(record, _RATIOS)
    if is_call(other):
        same = only(same, _OWN)
    return {**same, **other}


def points_of(record: Record, over: Sequence[Any], calls: Record) -> list[tuple[Any, Figure]]:
    """The figure that a template describes, at every point.

    Args:
        record: a record with places such as "{x}" to be filled.
        over: a value of x for each point, or a table with x and more.
        calls: templates of calls by name.
    """
    found = []
    for point in over:
        if isinstance(point, dict):
            table = point
        else:
            table = {"x": point}
        figure = figure_of(filled(record, table), calls)
        found.append((table["x"], figure))
    return found


def feasible(run: Bench, points: Iterable[tuple[Any, Make]]) -> list[tuple[Any, Any]]:
    """The figures at those points for which there is a plan."""
    found = []
    for x, figure in points:
        try:
            found.append((x, figure(run)))
        except InfeasibleError:
            continue
    return found


def make_of(record: Record, calls: Record) -> Make:
    """The way to make a value that a record describes.

    Raises:
        PipefitError: an unknown figure or call, or a record that this module does not know.
    """
    if "figure" in record:
        return figure_of(record, calls)
    if "descends" in record:
        return partial(_descends, figures=[make_of(each, calls) for each in record["descends"]])
    for name, join in _JOINTS.items():
        if name in record:
            points = points_of(record[name], record["each"], calls)
            return partial(_joined, points=points, join=join, **only(record, ("limit",)))
    raise PipefitError(f"expected figure, descends or one of {', '.join(_JOINTS)}; got {', '.join(record)}")


def _descends(run: Bench, figures: Sequence[Make]) -> bool:
    """Whether each of some figures is larger than the next."""
    found: list[Any] = [figure(run) for figure in figures]
    return all(a > b for a, b in pairwise(found))


def _joined(run: Bench, points: Points, join: Callable[..., Scalar], **options: float) -> Scalar:
    """One value of the figures at those points that are feasible."""
    return join(dict(feasible(run, points)), **options)


def _follows(found: Mapping[Any, float], holds: Callable[[float, float], bool], limit: float = 1.0) -> bool:
    """Whether something holds between each figure and `limit` times the one before."""
    return len(found) > 1 and all(holds(b, limit * a) for a, b in pairwise(found.values()))


def _best(found: Mapping[Any, float]) -> Any:
    return max(found, key=found.__getitem__)


def _most(found: Mapping[Any, float]) -> float:
    return max(found.values())


_JOINTS: Mapping[str, Callable[..., Scalar]] = {
    "falls": partial(_follows, holds=le),
    "rises": partial(_follows, holds=gt),
    "best": _best,
    "most": _most,
}
