"""When a device reached its work, in seconds of `time.perf_counter`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from pipefit.stage import accelerator


class Mark(NamedTuple):
    """A moment of the host and of the device's stream.

    Attributes:
        launched_s: when the host had launched what comes before, in seconds of `time.perf_counter`.
        reached: the event at which the device will have done it.
    """

    launched_s: float
    reached: Any


class Moments:
    """Marks moments of a GPU as events of its stream, without a wait, and reads them once they have come.

    The clocks of host and GPU differ, on an H100 by 23 microseconds per second. So a pass that begins a second after
    the newest comparison compares them again; an earlier moment counts back from it.

    Args:
        device: a GPU.
    """

    _FRESH_S = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Any = None
        self._start_s = 0.0

    def begin(self) -> None:
        """Begins a pass."""
        if self._start is None or time.perf_counter() - self._start_s > self._FRESH_S:
            accelerator.settle(self._device)
            self._start = self.mark().reached
            self._start.synchronize()
            self._start_s = time.perf_counter()

    def mark(self) -> Mark:
        """The moment at which the GPU will have done what it was given so far."""
        reached = accelerator.event_on(accelerator.current_stream(self._device), is_timed=True, spins=True)
        return Mark(time.perf_counter(), reached)

    def seconds(self, mark: Mark | float) -> float:
        """The time at which the GPU reached a moment, after a wait for it; a time stays as it is."""
        if isinstance(mark, float):
            return mark
        mark.reached.synchronize()
        return self._start_s + self._start.elapsed_time(mark.reached) * 1e-3
