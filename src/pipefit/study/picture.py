"""The timeline of a study as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipefit.draw.chart import hue, plotted
from pipefit.study.simulation import StudyTimeline

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
