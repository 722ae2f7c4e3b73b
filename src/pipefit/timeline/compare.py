"""Predicted and measured: times by operation and stage, and one function that compares two timelines."""

from __future__ import annotations

from collections import defaultdict
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
    times = defaultdict(list)
    for event in timeline.events:
        i = timeline.instruction(event)
        times[i.op.value, i.stage].append(event.duration_s)
    return {key: KindTimes(len(each), sum(each), median(each)) for key, each in sorted(times.items())}


def compare(predicted: Timeline, measured: Timeline) -> list[Row]:
    """Compares predicted with measured: makespan, period and bubble, then the median of each operation and stage.

    Makespans are per repeat, so that a prediction of one pass compares with a measurement of many.
    """
    count = measured.num_repeats
    one_pass = predicted.makespan_s / predicted.num_repeats
    measured_pass = measured.makespan_s / count
    bubble = measured.bubble_fraction - predicted.bubble_fraction
    rows = [
        _row("makespan", one_pass, measured_pass, count),
        _row("period", predicted.period_s, measured.period_s, count),
        Row("bubble", predicted.bubble_fraction, measured.bubble_fraction, bubble, count),
    ]
    expected = by_kind(predicted)
    found = by_kind(measured)
    nothing = KindTimes(0, 0, 0)
    for op, stage in sorted(expected.keys() | found.keys()):
        this = expected.get((op, stage), nothing)
        that = found.get((op, stage), nothing)
        name = op
        if stage >= 0:
            name += f" s{stage}"
        rows.append(_row(name, this.median_s, that.median_s, that.num_times))
    return rows


def notable(rows: Sequence[Row]) -> list[Row]:
    """The rows of which a part of the period is predicted that can be measured: at least a percent.

    A shorter operation takes mostly the time to start it, and its error says nothing about the run.
    """
    least = 0.0
    for row in rows:
        if row.name == "period":
            least = _NOTABLE * row.measured
    return [row for row in rows if row.name == "bubble" or row.predicted >= least]


def _row(name: str, predicted: float, measured: float, count: int) -> Row:
    error = 0.0
    if predicted:
        error = measured / predicted - 1
    elif measured:
        error = float("inf")
    return Row(name, predicted, measured, error, count)
