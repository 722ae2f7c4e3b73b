"""Predicted and measured: times by operation and stage, and one function that compares two timelines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pipefit.timeline.timeline import Timeline

_NOTABLE = 0.01


class KindTimes(NamedTuple):
    """Times of one operation on one stage.

    Attributes:
        num_times: number of runs, on all ranks and in all repeats.
        total_s: seconds of all runs.
        median_s: median seconds of one run.
    """

    num_times: int
    total_s: float
    median_s: float


class Row(NamedTuple):
    """One figure of two timelines.

    Attributes:
        name: "makespan", "period", "bubble", or an operation and stage such as "fwd s0".
        predicted: seconds (for "bubble": a fraction).
        measured: likewise.
        error: measured / predicted − 1; for "bubble" the difference; infinite where nothing was predicted.
        num_measured: number of measurements.
    """

    name: str
    predicted: float
    measured: float
    error: float
    num_measured: int


def by_kind(timeline: Timeline) -> dict[tuple[str, int], KindTimes]:
    """Times by (operation, stage), in the order of operations and stages; −1 for operations without a stage.

    For messages and reductions the time is from issuing to arrival, so it contains the wait for the other side.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for event in timeline.events:
        i = timeline.instruction(event)
        times.setdefault((i.op.value, i.stage), []).append(event.end_s - event.start_s)
    return {key: KindTimes(len(item), sum(item), median(item)) for key, item in sorted(times.items())}


def compare(predicted: Timeline, measured: Timeline) -> list[Row]:
    """Compares predicted with measured: makespan, period and bubble, then the median of each operation and stage.

    Makespans are per repeat, so that a prediction of one pass compares with a measurement of many.
    """
    figures = [
        ("makespan", predicted.makespan_s / predicted.num_repeats, measured.makespan_s / measured.num_repeats),
        ("period", predicted.period_s, measured.period_s),
    ]
    rows = [_row(name, a, b, measured.num_repeats) for name, a, b in figures]
    a = predicted.bubble_fraction
    b = measured.bubble_fraction
    rows.append(Row("bubble", a, b, b - a, measured.num_repeats))
    expected = by_kind(predicted)
    found = by_kind(measured)
    for op, stage in sorted(expected.keys() | found.keys()):
        nothing = KindTimes(0, 0, 0)
        this = expected.get((op, stage), nothing)
        that = found.get((op, stage), nothing)
        rows.append(_row(f"{op} s{stage}" if stage >= 0 else op, this.median_s, that.median_s, that.num_times))
    return rows


def notable(rows: Sequence[Row]) -> list[Row]:
    """The rows of which a part of the period is predicted that can be measured: at least a percent.

    The time of a shorter operation is mostly that of starting it, and its error says nothing about the run.
    """
    period = max((row.measured for row in rows if row.name == "period"), default=0.0)
    return [row for row in rows if row.name == "bubble" or row.predicted >= _NOTABLE * period]


def _row(name: str, predicted: float, measured: float, count: int) -> Row:
    if predicted:
        return Row(name, predicted, measured, measured / predicted - 1, count)
    return Row(name, predicted, measured, float("inf") if measured else 0.0, count)
