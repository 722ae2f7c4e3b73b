"""Policies that choose the trial of a free device, and studies simulated under them."""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipefit.errors import PipefitError, look_up

# ---- policies ------------------------------------------------------------------------------------------------------


SLACK = 0.02
"""Tolerance of `lrtf`: a device keeps its last trial while the longest one is longer by at most this share of the
remaining time of all trials, which vanishes towards the end."""


class Ready(NamedTuple):
    """A trial that could take its next turn now.

    Attributes:
        number: of the trial, in the order of the study.
        remaining_s: in isolation; infinite until it, or a trial of its kind, was measured.
        last_turn: time of its last turn, counted in turns of the study; −1: none.
        device: of its last turn; −1: none.
        steps: that remain.
    """

    number: int
    remaining_s: float
    last_turn: int
    device: int
    steps: int = 0


Policy = Callable[[Sequence[Ready], int], int | None]
"""From the ready trials and the free device to the number of the trial that it takes; None: it waits."""


def lrtf(ready: Sequence[Ready], device: int) -> int | None:
    """Sharded-LRTF: the trial with the longest remaining time; among those of unknown time, that with the most steps.

    Among trials of almost the same length, the one that the device had last: its shards need not be read.
    Source: Hydra (PVLDB 2022) §4.
    """
    longest = max(ready, key=lambda trial: (trial.remaining_s, trial.steps, -trial.number))
    own = [trial for trial in ready if trial.device == device]
    if longest.remaining_s == math.inf:
        near = [trial for trial in own if trial.remaining_s == math.inf and trial.steps == longest.steps]
    else:
        least = longest.remaining_s - SLACK * sum(trial.remaining_s for trial in ready)
        near = [trial for trial in own if trial.remaining_s >= least]
    if near:
        return max(near, key=lambda trial: trial.last_turn).number
    return longest.number


def fifo(ready: Sequence[Ready], device: int) -> int | None:
    """The earliest trial of the study that is ready."""
    return min(trial.number for trial in ready)


def round_robin(ready: Sequence[Ready], device: int) -> int | None:
    """The trial that has waited longest since its last turn."""
    return min(ready, key=lambda trial: (trial.last_turn, trial.number)).number


def whole_task(ready: Sequence[Ready], device: int) -> int | None:
    """A device keeps its trial to the end, then takes the next one that has not begun: a study without shards."""
    kept = [trial.number for trial in ready if trial.device == device]
    new = [trial.number for trial in ready if trial.device < 0]
    if kept:
        return min(kept)
    return min(new, default=None)


def random_order(ready: Sequence[Ready], device: int) -> int | None:
    """Any trial, by a fixed hash: what a study without a policy comes to."""
    return min(ready, key=lambda trial: zlib.crc32(f"{trial.number}:{trial.steps}:{device}".encode())).number


POLICIES: Mapping[str, Policy] = {
    "lrtf": lrtf,
    "fifo": fifo,
    "round-robin": round_robin,
    "whole-task": whole_task,
    "random": random_order,
}
"""By name; `whole-task` and `random` are baselines."""


# ---- simulation ----------------------------------------------------------------------------------------------------


class TrialCost(NamedTuple):
    """The time of a trial's turns.

    Attributes:
        turns_s: seconds of each turn of one step, in their order.
        num_steps: number of steps.
        admission_s: seconds to build it, before its first turn.
    """

    turns_s: tuple[float, ...]
    num_steps: int
    admission_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the trial in isolation."""
        return self.admission_s + self.num_steps * sum(self.turns_s)


class TimedTurn(NamedTuple):
    """A turn of a shard on a device, with its times.

    Attributes:
        trial: its number.
        device: of the turn.
        step: of the trial; −1: its admission.
        turn: within the step.
        start_s: its start, in seconds of the machine's monotonic clock.
        end_s: its commit.
        loss: of the step, when the turn has completed it; NaN otherwise.
        held_out: the loss on held-out data after the step, where it was evaluated; NaN otherwise.
        moved_s: seconds of reading and writing state in that time.
    """

    trial: int
    device: int
    step: int
    turn: int
    start_s: float
    end_s: float
    loss: float = math.nan
    held_out: float = math.nan
    moved_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Its duration in seconds."""
        return self.end_s - self.start_s


class StudyTimeline(NamedTuple):
    """A study, run or simulated.

    Attributes:
        turns: in the order of their ends.
        makespan_s: from the first start to the last end.
        bound_s: lower bound over all policies: max(longest trial, total / devices).
    """

    turns: tuple[TimedTurn, ...]
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Makespan over the bound, minus one; 0 without turns."""
        if self.bound_s > 0:
            return self.makespan_s / self.bound_s - 1
        return 0.0


def lower_bound_s(totals_s: Sequence[float], num_devices: int) -> float:
    """max(longest trial, total / devices): a trial's turns follow each other, and devices do one at a time.

    >>> lower_bound_s([3.0, 1.0, 1.0], 2)
    3.0
    """
    return max(max(totals_s, default=0.0), sum(totals_s) / num_devices)


def one_by_one_s(totals_s: Sequence[float], stages: Sequence[int], microbatches: Sequence[int]) -> float:
    """Seconds of training one trial after the other, each as a GPipe pipeline of equal stages over the devices.

    Σ total·(m + p − 1)/(m·p); with one micro-batch this is naive model parallelism, Σ total.

    >>> one_by_one_s([8.0, 8.0], [4, 4], [4, 4]), one_by_one_s([8.0, 8.0], [4, 4], [1, 1])
    (7.0, 16.0)

    Args:
        totals_s: seconds of each trial on one device.
        stages: p of each, the devices that its shards can occupy.
        microbatches: m of each.
    """
    pipelined = zip(totals_s, stages, microbatches, strict=True)
    return sum(total * (m + p - 1) / (m * p) for total, p, m in pipelined)


_MOST_TURNS = 6000
"""Maximum number of simulated turns: more would take seconds, and change no printed digit."""


def coarser(costs: Sequence[TrialCost], most: int = _MOST_TURNS) -> list[TrialCost]:
    """The trials with consecutive turns merged, where there are more than `most`.

    >>> coarser([TrialCost((1.0, 2.0), 3)], most=2)
    [TrialCost(turns_s=(4.0, 5.0), num_steps=1, admission_s=0.0)]
    """
    size = -(-sum(cost.num_steps * len(cost.turns_s) for cost in costs) // most)
    if size <= 1:
        return list(costs)
    merged = []
    for cost in costs:
        turns = cost.turns_s * cost.num_steps
        parts = [sum(turns[first : first + size]) for first in range(0, len(turns), size)]
        merged.append(cost._replace(turns_s=tuple(parts), num_steps=1))
    return merged


class _Run:
    """A trial in the simulation."""

    def __init__(self, cost: TrialCost) -> None:
        self.turns: list[tuple[int, int, float]] = []
        if cost.admission_s:
            self.turns.append((-1, 0, cost.admission_s))
        for step in range(cost.num_steps):
            self.turns += [(step, turn, seconds) for turn, seconds in enumerate(cost.turns_s)]
        self.at = 0
        self.left_s = cost.total_s
        self.last_turn = -1
        self.device = -1


def simulate_study(costs: Sequence[TrialCost], num_devices: int, policy: str = "lrtf") -> StudyTimeline:
    """Simulates a study whose turns take known times.

    Args:
        costs: of the trials, in the order of the study.
        num_devices: that take turns.
        policy: a name from `POLICIES`.

    Raises:
        PipefitError: no devices, an unknown policy, or a cost that is not a finite time.
    """
    if num_devices < 1:
        raise PipefitError(f"a study needs at least 1 device, got {num_devices}")
    if any(not 0 <= s < float("inf") for cost in costs for s in (*cost.turns_s, cost.admission_s)):
        raise PipefitError("a study's turns need finite times of at least 0")
    choose = look_up(policy, POLICIES, "unknown policy")
    runs = [_Run(cost) for cost in costs]
    ready = {number for number, run in enumerate(runs) if run.turns}
    idle = list(range(num_devices))
    busy: list[tuple[float, int, int, float]] = []  # (end, device, trial, start)
    turns = []
    now = 0.0
    count = 0
    while ready or busy:
        for device in list(idle):
            offer = [Ready(n, runs[n].left_s, runs[n].last_turn, runs[n].device) for n in sorted(ready)]
            if not offer or (number := choose(offer, device)) is None:
                continue
            ready.discard(number)
            idle.remove(device)
            run = runs[number]
            run.last_turn = count
            run.device = device
            count += 1
            heapq.heappush(busy, (now + run.turns[run.at][2], device, number, now))
        now, device, number, began = heapq.heappop(busy)
        run = runs[number]
        step, turn, seconds = run.turns[run.at]
        turns.append(TimedTurn(number, device, step, turn, began, now))
        run.at += 1
        run.left_s -= seconds
        idle = sorted([*idle, device])
        if run.at < len(run.turns):
            ready.add(number)
    return StudyTimeline(tuple(turns), now, lower_bound_s([cost.total_s for cost in costs], num_devices))
