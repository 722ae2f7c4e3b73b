"""How much the same work takes now more, now less: what a step loses where ranks wait for whoever is late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

__all__ = ["Spread"]


class Spread:
    """By how much pieces of work took more or less than their mean.

    Interruptions come by chance, so what takes four times as long varies by twice as many seconds.
    """

    def __init__(self) -> None:
        # Mean seconds, and how many more this one took.
        self._pieces: list[tuple[float, float]] = []

    def add(self, seconds: Sequence[float]) -> None:
        """Takes times of the same work, one right after the other."""
        mean_s = fmean(seconds)
        self._pieces += [(mean_s, one - mean_s) for one in seconds]

    def draws(self, seed: int) -> Callable[[float], float]:
        """Gives, for the mean seconds of a piece of work, those of one at random; the same for the same seed."""
        if not self._pieces:
            return lambda seconds: seconds
        choose = random.Random(seed).choice

        def drawn(seconds: float) -> float:
            mean_s, more_s = choose(self._pieces)
            return max(seconds + more_s * math.sqrt(seconds / mean_s), 0.0)

        return drawn
