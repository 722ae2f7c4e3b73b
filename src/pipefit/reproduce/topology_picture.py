"""The picture of a machine: devices in servers, and the links of each level."""

from __future__ import annotations

from typing import Any

from pipefit.draw.chart import plotted
from pipefit.planner.machines import load_topology
from pipefit.reproduce.entry import Bench, Picture

_TEAL = "#2b8580"
_BLUE = "#2960a6"
_AMBER = "#dd9a1c"


def topology_picture(run: Bench, machine: str) -> Picture:
    """Devices in servers, and the links of each level."""
    inner, outer = load_topology(machine).levels
    inside = f"B1: {inner.bandwidth_bytes_per_s / 1e9:g} GB/s"
    between = f"B2: {outer.bandwidth_bytes_per_s / 1e9:g} GB/s"

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for server in range(outer.width):
            _draw_server(axes, server * (inner.width + 1), inner.width, inside)
        last = (outer.width - 1) * (inner.width + 1)
        axes.plot([1.5, last + 1.5], [-0.8, -0.8], color=_BLUE)
        axes.text(1.6, -1.15, between, fontsize=10)
        axes.set(xlim=(-0.8, last + inner.width - 0.4 + 0.8), ylim=(-1.4, 1.5))
        axes.axis("off")

    text = f"{outer.width} servers of {inner.width} devices; {inside} inside, {between} between"
    return Picture("A two-level topology", lambda: plotted(draw, 900, 260, f"A two-level topology: {machine}"), text)


def _draw_server(axes: Any, left: int, width: int, inside: str) -> None:
    from matplotlib.patches import Rectangle

    corner = (left - 0.4, -0.2)
    box = Rectangle(corner, width - 0.2, 1.4, fill=False, linestyle="--", edgecolor=_AMBER, linewidth=2)
    axes.add_patch(box)
    axes.plot([left, left + width - 1], [0.2, 0.2], color=_TEAL)
    for device in range(left, left + width):
        axes.add_patch(Rectangle((device - 0.25, 0.4), 0.5, 0.5, color=_TEAL))
        axes.plot([device] * 2, [0.2, 0.4], color=_TEAL)
    middle = left + (width - 1) / 2
    axes.plot([middle, middle], [-0.8, 0.2], color=_BLUE)
    axes.text(left, 1.0, inside, fontsize=10)
