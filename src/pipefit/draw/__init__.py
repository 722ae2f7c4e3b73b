"""Pictures of timelines, simulated or measured: a grid, SVG, an interactive page, PNG; and plain charts.

The package is callable, as a short form of `draw.draw`: `pf.draw("1f1b", num_stages=4, num_microbatches=8)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from pipefit.draw.chart import chart
from pipefit.draw.drawing import Drawing, draw
from pipefit.draw.grid import grid
from pipefit.draw.page import html
from pipefit.draw.save import SUFFIXES, save
from pipefit.draw.svg import svg


class _Callable(ModuleType):
    """Importing `pipefit.draw` makes `pipefit.draw` this module; calling it must still draw."""

    def __call__(self, *args: Any, **options: Any) -> Drawing:
        return draw(*args, **options)


sys.modules[__name__].__class__ = _Callable
