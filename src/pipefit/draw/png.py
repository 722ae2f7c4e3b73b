"""A timeline as a bitmap for slides and papers."""

from __future__ import annotations

from pathlib import Path

from pipefit.draw.raster import save_bitmap
from pipefit.draw.svg import svg
from pipefit.timeline import Timeline

__all__ = ["png"]


def png(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str | None = None,
    seconds: bool | None = None,
    dark: bool = False,
    scale: float = 2.0,
) -> Path:
    """Writes the picture of a timeline as PNG: what `svg` draws, `scale` pixels for each of its own.

    Raises:
        PipefitError: Pillow is not installed, or the path cannot be written.
    """
    picture = svg(timeline, title=title, seconds=seconds, theme="dark" if dark else "light")
    return save_bitmap(path, picture, scale=scale)
