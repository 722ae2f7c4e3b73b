"""Time stamps of a device: processor time or the wall clock on a CPU, events of the stream on an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from pipefit.stage import accelerator


class Clock:
    """Marks moments on a device.

    On an accelerator they are events, so that marking never waits for it. On a CPU they are the wall clock or, with
    `own`, the processor time of the calling thread: the same on a quiet machine, and on a busy one without the time
    in which other programs had the processor.
    """

    def __init__(self, device: torch.device, own: bool = False) -> None:
        self._is_accelerator = accelerator.is_accelerator(device)
        self.device = device
        if own:
            self._now = time.thread_time
        else:
            self._now = time.perf_counter

    def mark(self) -> Any:
        """A time stamp in the order of the device's work."""
        if not self._is_accelerator:
            return self._now()
        return accelerator.event_on(accelerator.current_stream(self.device), is_timed=True)

    def settle(self) -> None:
        """Waits until all marks are reached."""
        if self._is_accelerator:
            accelerator.settle(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of some work."""
        start = self.mark()
        work()
        end = self.mark()
        self.settle()
        return self.between(start, end)

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; `settle` first."""
        if self._is_accelerator:
            return start.elapsed_time(end) * 1e-3
        return end - start


def works_alone(work: Callable[[], object]) -> bool:
    """Returns whether the calling thread does all of the work: then its processor time is the time of the work."""
    process = time.process_time()
    thread = time.thread_time()
    work()
    process = time.process_time() - process
    thread = time.thread_time() - thread
    return process - thread < 0.05 * thread


def median_of(samples: Sequence[float]) -> float:
    """The median; 0 for no samples."""
    if samples:
        return float(median(samples))
    return 0.0


def half_interquartile_range(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, which one slow sample does not move.

    >>> half_interquartile_range([1.0, 2.0, 3.0, 4.0, 100.0])
    1.0
    """
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, method="inclusive")
    return (high - low) / 2
