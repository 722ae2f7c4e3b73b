"""The timeline of a study, as a picture and as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipefit.draw.chart import hue, plotted
from pipefit.spec.files import JsonObject
from pipefit.study.simulation import StudyTimeline, TimedTurn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 5  # of the legend
_MOST_BOXES = 3000
"""Number of boxes beyond which they are an image inside the picture."""


def picture(outcome: StudyTimeline, names: Sequence[str], num_devices: int, title: str = "") -> str:
    """A study as SVG: a row per device, a hue per trial, a box per turn, and the lower bound as a line.

    Args:
        outcome: measured or simulated.
        names: of the trials.
        num_devices: rows.
        title: above it.

    Raises:
        PipefitError: matplotlib is not installed.
    """

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch

        axes = figure.add_subplot(xlabel="s")
        are_many = len(outcome.turns) > _MOST_BOXES
        for trial in range(len(names)):
            turns = [turn for turn in outcome.turns if turn.trial == trial]
            devices = [turn.device for turn in turns]
            starts = [turn.start_s for turn in turns]
            ends = [turn.end_s for turn in turns]
            colors = [(*hue(trial), 0.45 if turn.step < 0 else 1.0) for turn in turns]
            axes.hlines(devices, starts, ends, colors=colors, linewidth=30, rasterized=are_many)
        axes.set_yticks(range(num_devices), [f"device {device}" for device in range(num_devices)])
        axes.set_ylim(num_devices - 0.5, -0.5)
        bound = axes.axvline(outcome.bound_s, linestyle="--", color="#d6336c", label="lower bound")
        axes.margins(x=0.01)
        axes.grid(axis="y", visible=False)
        patches = [Patch(color=hue(trial), label=name) for trial, name in enumerate(names)]
        figure.legend(handles=[*patches, bound], loc="outside lower left", ncols=_COLUMNS)

    return plotted(draw, 1080, 120 + 46 * num_devices + 24 * (len(names) // _COLUMNS + 1), title)


def trace(outcome: StudyTimeline, names: Sequence[str]) -> JsonObject:
    """The timeline as a Chrome trace, which Perfetto opens: a process per device."""
    items = [
        {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": f"device {device}"}}
        for device in sorted({turn.device for turn in outcome.turns})
    ]
    items += [
        {
            "ph": "X",
            "name": f"{names[turn.trial]}: {_label(turn)}",
            "cat": names[turn.trial],
            "pid": turn.device,
            "tid": 0,
            "ts": turn.start_s * 1e6,
            "dur": (turn.end_s - turn.start_s) * 1e6,
            "args": {"trial": turn.trial, "step": turn.step, "turn": turn.turn},
        }
        for turn in outcome.turns
    ]
    return {"format": "pipefit.study-timeline/1", "displayTimeUnit": "ms", "traceEvents": items}


def _label(turn: TimedTurn) -> str:
    if turn.step < 0:
        return "admission"
    return f"step {turn.step + 1}, turn {turn.turn}"
