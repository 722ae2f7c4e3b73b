"""Which trial a free device takes next: the same functions in the simulation of a study and in the study itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["POLICIES", "SLACK", "Policy", "Ready"]

SLACK = 0.02
"""Under `lrtf` a device stays with a trial that it has had while that is at most so much shorter than the longest: a
share of all the remaining time, so that it is nothing in the end, where it would count."""


class Ready(NamedTuple):
    """A trial that could take its next turn now.

    Attributes:
        number: of the trial, in the order of the study.
        remaining_s: how long it would still take alone; infinite before it was ever measured.
        last_turn: when it last had a turn, counted in turns of the study; −1: never.
        device: that had it last; −1: none.
    """

    number: int
    remaining_s: float
    last_turn: int
    device: int


Policy = Callable[[Sequence[Ready], int], int | None]
"""From the trials that are ready and the device that is free to the number of the one it takes; None: it waits."""


def lrtf(ready: Sequence[Ready], device: int) -> int | None:
    """Sharded-LRTF: the trial with the longest remaining time.

    Among trials that are as good as equally long, the one that the device had last: its shards need not be read.
    Source: Hydra (PVLDB 2022) §4.
    """
    longest = max(ready, key=lambda trial: (trial.remaining_s, -trial.number))
    least = longest.remaining_s
    if least < math.inf:
        least -= SLACK * sum(trial.remaining_s for trial in ready)
    near = [trial for trial in ready if trial.device == device and trial.remaining_s >= least]
    return max(near, key=lambda trial: trial.last_turn).number if near else longest.number


def fifo(ready: Sequence[Ready], device: int) -> int | None:
    """The earliest trial of the study that is ready."""
    return min(trial.number for trial in ready)


def round_robin(ready: Sequence[Ready], device: int) -> int | None:
    """The trial that has waited longest since its last turn."""
    return min(ready, key=lambda trial: (trial.last_turn, trial.number)).number


def whole_task(ready: Sequence[Ready], device: int) -> int | None:
    """A device keeps its trial to the end, then takes the next one nobody has begun: what studies do without shards."""
    own = [trial.number for trial in ready if trial.device == device]
    new = [trial.number for trial in ready if trial.device < 0]
    return min(own) if own else min(new, default=None)


POLICIES: Mapping[str, Policy] = {"lrtf": lrtf, "fifo": fifo, "round-robin": round_robin, "whole-task": whole_task}
"""By name; `whole-task` is the baseline."""
