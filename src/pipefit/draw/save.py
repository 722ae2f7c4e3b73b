"""Pictures as files, in the format of the suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipefit.draw.grid import grid
from pipefit.draw.page import html
from pipefit.draw.svg import svg
from pipefit.errors import PipefitError
from pipefit.ir import text
from pipefit.spec.files import write_atomically
from pipefit.timeline import Timeline, save_trace


def _grid(timeline: Timeline, path: Path, **options: Any) -> Path:
    return write_atomically(path, grid(timeline, **{"width": 160, "color": False, **options}))


def save_bitmap(path: str | Path, picture: str) -> Path:
    """Writes a picture, which is SVG text, as PNG at twice its size in pixels, atomically.

    Raises:
        PipefitError: a required library is not installed.
    """
    try:
        import matplotlib
        import resvg_py
    except ModuleNotFoundError as error:
        raise PipefitError(
            f"{path}: a PNG needs {error.name}, which is not installed; pip install 'pipefit[plot]', or save an .svg"
        ) from None
    # The fonts that matplotlib brings, so that a picture looks the same on every machine.
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    data = resvg_py.svg_to_bytes(
        picture,
        zoom=2,
        background="white",
        skip_system_fonts=True,
        font_dirs=[str(fonts)],
        sans_serif_family="DejaVu Sans",
    )
    return write_atomically(path, data)


_WRITERS: dict[str, Callable[..., Path]] = {
    ".svg": lambda timeline, path, **options: write_atomically(path, svg(timeline, **options)),
    ".html": lambda timeline, path, **options: write_atomically(path, html(timeline, **options)),
    ".png": lambda timeline, path, **options: save_bitmap(path, svg(timeline, **options)),
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
        options: the options of the function that makes this kind of picture.

    Raises:
        PipefitError: another suffix, or a path that cannot be written.
    """
    target = Path(path)
    for suffix, write in _WRITERS.items():
        if target.name.endswith(suffix):
            return write(timeline, target, **options)
    raise PipefitError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}; got {target.suffix or 'none'!r}")
