"""Time stamps of a device: the wall clock on a CPU, events of the stream on CUDA."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

__all__ = ["Clock", "half_interquartile_range", "median_of"]


class Clock:
    """Marks moments on a device; on CUDA they are events, so that marking never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def mark(self) -> Any:
        """A time stamp of now, in the order of the device's work."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Waits until all marks are reached."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; `settle` first."""
        return start.elapsed_time(end) * 1e-3 if self.cuda else end - start


def median_of(samples: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return float(median(samples)) if samples else 0.0


def half_interquartile_range(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, which one slow sample does not move.

    >>> half_interquartile_range([1.0, 2.0, 3.0, 4.0, 100.0])
    1.0
    """
    if len(samples) < 2:
        return 0.0
    ordered = sorted(samples)

    def at(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return (at(0.75) - at(0.25)) / 2
