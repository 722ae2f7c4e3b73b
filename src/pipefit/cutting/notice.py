"""A line that says what a cut does, once, when it takes long."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("pipefit.cut")

AFTER_S = 2.0
"""Seconds after which a cut says what it does."""

_TRACES = 4
"""Times that a trace takes at least what was run before it."""


@dataclass
class _Cutting:
    """A cut that runs: its model, its begin in seconds of `time.monotonic`, and whether nothing more is to be said."""

    kind: str
    begin: float
    is_silent: bool

    def say(self, text: str, passed: float) -> None:
        """Writes the line if these seconds are long."""
        if not self.is_silent and passed >= AFTER_S:
            self.is_silent = True
            _log.warning("%s", text)


_running: ContextVar[_Cutting | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def noticed(model: Any) -> Iterator[None]:
    """The context of a cut, or of the proof of a sequence of layers, which the first rank reports if it takes long."""
    is_other = int(os.environ.get("RANK", 0)) != 0
    token = _running.set(_Cutting(type(model).__name__, time.monotonic(), is_other))
    try:
        yield
    finally:
        _running.reset(token)


def proves(layer: int, num_layers: int) -> None:
    """Notes that a layer, from 0, is proved now."""
    cutting = _running.get()
    if cutting is not None:
        passed = time.monotonic() - cutting.begin
        text = f"proving the layers of {cutting.kind} with the example: layer {layer + 1} of {num_layers}"
        cutting.say(f"{text} (fewer samples take less time)", passed)


def traces() -> None:
    """Notes that a graph is traced now, which is one long call: the line comes before it, by an estimate."""
    cutting = _running.get()
    if cutting is not None:
        passed = time.monotonic() - cutting.begin
        cutting.say(f"tracing the graph of {cutting.kind} to cut it", (1 + _TRACES) * passed)
