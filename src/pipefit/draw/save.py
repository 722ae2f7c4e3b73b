"""Pictures as files: the suffix says which kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipefit.draw.grid import grid
from pipefit.draw.page import html
from pipefit.draw.raster import save_bitmap
from pipefit.draw.svg import svg
from pipefit.errors import PipefitError
from pipefit.ir import text
from pipefit.spec.files import write_atomically
from pipefit.timeline import Timeline, save_trace


def _grid(timeline: Timeline, path: Path, **options: Any) -> Path:
    return write_atomically(path, grid(timeline, **{"width": 160, "color": False, **options}))


def _bitmap(timeline: Timeline, path: Path, *, dark: bool = False, scale: float = 2.0, **options: Any) -> Path:
    return save_bitmap(path, svg(timeline, theme="dark" if dark else "light", **options), scale=scale)


_WRITERS: dict[str, Callable[..., Path]] = {
    ".svg": lambda timeline, path, **options: write_atomically(path, svg(timeline, **options)),
    ".html": lambda timeline, path, **options: write_atomically(path, html(timeline, **options)),
    ".png": _bitmap,
    ".trace.json": save_trace,
    ".pipe": lambda timeline, path: text.save(timeline.program, path),
    ".txt": _grid,
}

SUFFIXES = tuple(_WRITERS)
"""The kinds of files that `save` writes."""


def save(timeline: Timeline, path: str | Path, **options: Any) -> Path:
    """Writes a timeline as a picture, a Chrome trace or, with `.pipe`, its program.

    Args:
        timeline: simulated or measured.
        path: ends in one of `SUFFIXES`.
        options: of the function that makes this kind of picture.

    Raises:
        PipefitError: another suffix, or a path that cannot be written.
    """
    target = Path(path)
    for suffix, write in _WRITERS.items():
        if target.name.endswith(suffix):
            return write(timeline, target, **options)
    raise PipefitError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}; got {target.suffix or 'none'!r}")
