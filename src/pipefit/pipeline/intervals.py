"""The seconds between two checkpoints, so that saving takes at most a share of the time of the training.

    seconds = max(60, (copy + write) / share)        copy: training waits; write: processor time of the thread

The copy and the write are those of the last checkpoint, as in CheckFreq (Mohan et al., FAST 2021,
https://www.usenix.org/conference/fast21/presentation/mohan), which counts iterations in place of seconds. The first
checkpoint, which is measured, follows 60 s after the first step: before that a repetition is cheaper than a copy.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_S = 60.0
"""Least seconds between two checkpoints."""

_BUSY_S = 1.0


class Interval:
    """Says at which steps a training pauses, and whether a checkpoint is due there.

    Args:
        share: the share of the time that saving may take.
        clock: returns seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._last: tuple[float, int] | None = None
        self._saved_s = self._copy_s = 0.0

    def look(self, step: int, is_busy: bool, write_s: float) -> tuple[bool, int]:
        """Looks at the clock after a step.

        Args:
            step: its number.
            is_busy: whether the last checkpoint is still being written.
            write_s: processor seconds that this took, once it has ended.

        Returns:
            Whether a checkpoint is due, and the step after which to look again.
        """
        now = self._clock()
        before, last = self._last or (now, step)
        self._last = (now, step)
        if last == step:
            self._saved_s = now
            return False, step + 1
        left_s = self._saved_s + max(LEAST_S, (self._copy_s + write_s) / self._share) - now
        if left_s <= 0 and not is_busy:
            return True, step + 1
        # Half the way, because steps may become longer.
        half_s = (left_s if left_s > 0 else _BUSY_S) / 2
        return False, step + max(1, int(half_s * (step - last) / max(now - before, 1e-9)))

    def saved(self, copy_s: float) -> None:
        """Notes a checkpoint, for which the training waited so many seconds."""
        self._saved_s = self._clock()
        self._copy_s = copy_s
