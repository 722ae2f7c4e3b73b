"""Timelines as files of every kind that `-o` may name, and as a grid in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipefit.timeline import Timeline

__all__ = ["PICTURES", "grid_of", "save_picture"]

PICTURES: Final = (".svg", ".html", ".png", ".trace.json", ".pipe")
"""The endings of `-o`."""


def save_picture(timeline: Timeline, path: Path) -> None:
    """Writes a timeline, or with `.pipe` its program, as the ending of the path says."""
    if path.suffix == ".pipe":
        from pipefit.ir import text

        text.save(timeline.program, path)
    elif path.name.endswith(".trace.json"):
        from pipefit.timeline import save_trace

        save_trace(timeline, path)
    else:
        from pipefit.draw import save

        save(timeline, path)


def grid_of(timeline: Timeline) -> str:
    """A timeline for the terminal."""
    from pipefit.draw import grid

    return grid(timeline)
