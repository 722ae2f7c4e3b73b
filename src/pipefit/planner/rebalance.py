"""When layers move: a policy over windows of a run's steps, a pure function of the times that all ranks have measured.

    window   1      2        3        4 ─ move ─ 5        6      7
    times    first  compare  compare  compare    skipped  learn  compare
                                └─ both gain ─┘

A window holds the medians of some steps, so one bad step is not seen. Another plan is taken where all of this holds:

- by the times of this window and by those of the window before, steps are shorter by more than the least gain, and by
  more than some times the noise of the measurement: what passes within a window moves nothing;
- the gain over the steps that are left is more than the cost of the move;
- no device lacks memory for it;
- it is no plan that the run has left, unless a rank has since changed its speed by a quarter, or steps were shorter.

Where a move has not brought half of its gain, the least gain doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pipefit.cost import of_plan
from pipefit.errors import ScheduleError
from pipefit.planner.better_plan import Estimate, Times, estimate, learned, others
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology
from pipefit.units import format_seconds

LEAST_GAIN: Final = 0.05
"""The least part of a step's time for which layers move, at first."""

_NOISES = 3.0
_CHANGED = 1.25


class Window(NamedTuple):
    """Measurements of some steps that followed each other.

    Attributes:
        step: the last of them.
        times: median seconds of each stage on each of its ranks, forward and backward.
        noise: relative standard error of these medians, the largest.
        period_s: median seconds from step to step.
        steps_left: of the run.
        move_s: seconds of the move before, or what the first one is assumed to take in addition to its bytes.
    """

    step: int
    times: Times
    noise: float
    period_s: float
    steps_left: int
    move_s: float


@dataclass(frozen=True)
class Move:
    """A move that pays.

    Attributes:
        plan: after it.
        step: after which it is made.
        what: the layers or shares before and after, in words.
        why: its reason in words.
        gain: the part of a step's time that it is predicted to save.
        before_s: measured seconds of a step.
    """

    plan: Plan
    step: int
    what: str
    why: str
    gain: float
    before_s: float

    @property
    def after_s(self) -> float:
        """Predicted seconds of a step."""
        return self.before_s * (1 - self.gain)

    def __str__(self) -> str:
        times = f"{format_seconds(self.before_s)} → {format_seconds(self.after_s)} per step"
        predicted = f"predicted: {times} ({-self.gain:.0%})"
        return f"after step {self.step}: {self.what}; {self.why}; {predicted}"


class _Left(NamedTuple):
    """A plan that ran before, with the slowness of ranks and the seconds of steps when the run left it."""

    plan: Plan
    slowness: Sequence[float]
    period_s: float


class Rebalance:
    """The policy of one run; all that are given the same windows decide the same.

    Args:
        plan: that runs.
        profile: of the layers, at the micro-batch size of the run; its seconds may be in any unit.
        topology: the links between the ranks; its cores do not count, because measured times hold their effect.
        state_per_weight: bytes of optimizer states for each byte of weights.
    """

    def __init__(self, plan: Plan, profile: Profile, topology: Topology, state_per_weight: float = 2.0) -> None:
        self.plan = plan
        self._profile = profile
        self._topology = topology
        self._state = state_per_weight
        self._least = LEAST_GAIN
        self._earlier: Estimate | None = None
        self._last: tuple[Move, Estimate] | None = None
        self._skips = False
        self._left: list[_Left] = []

    def look(self, window: Window) -> Move | None:
        """Takes a window; returns the move that pays, None: none does."""
        if self._skips or min(window.times.values()) <= 0:
            self._skips = False
            return None
        if self._last is not None:
            move, before = self._last
            self._profile = learned(self.plan, before, window.times)
            gain = 1 - window.period_s / move.before_s
            if gain < move.gain / 2:
                self._least *= 2
            self._last = None
        now = estimate(self.plan, self._profile, window.times)
        earlier = self._earlier
        self._earlier = now
        if earlier is None:
            return None
        return self._best(window, [earlier, now])

    def moved(self, move: Move) -> None:
        """Notes a move that was made: the first window after it is not measured."""
        assert self._earlier is not None
        self._left.append(_Left(self.plan, self._earlier.slowness, move.before_s))
        self._last = move, self._earlier
        self.plan = move.plan
        self._earlier = None
        self._skips = True

    def _best(self, window: Window, estimates: Sequence[Estimate]) -> Move | None:
        now = estimates[-1]
        least = max(self._least, _NOISES * window.noise)
        found = []
        for other in others(self.plan, now, window.times):
            gain = min(self._gain(other, each) for each in estimates)
            saved_s = gain * window.period_s * window.steps_left
            cost_s = window.move_s + self._travel_s(other)
            shorter_s = (1 - least) * window.period_s
            pays = gain > least and saved_s > cost_s
            if pays and self._fits(other) and not self._is_behind(other, now, shorter_s):
                what = f"{shape_of(self.plan)} → {shape_of(other)}"
                why = _why(window.times, now.slowness)
                found.append(Move(other, window.step, what, why, gain, window.period_s))
        return max(found, key=lambda move: move.gain, default=None)

    def _gain(self, other: Plan, by: Estimate) -> float:
        """The part of a step that another plan saves."""
        try:
            after_s = by.step_s(other, self._topology)
        except ScheduleError:  # the schedule has no program for these shares
            return 0.0
        return 1 - after_s / by.step_s(self.plan, self._topology)

    def _is_behind(self, other: Plan, now: Estimate, most_s: float) -> bool:
        """Returns whether the run has left this plan, at the speeds of now, with steps of more than `most_s`."""
        for left in self._left:
            ratios = [new / old for new, old in zip(now.slowness, left.slowness, strict=True)]
            is_same = 1 / _CHANGED < min(ratios) and max(ratios) < _CHANGED
            if left.plan == other and is_same and left.period_s > most_s:
                return True
        return False

    def _fits(self, other: Plan) -> bool:
        """Returns whether no rank needs more memory than its device has, unless it needs as much now."""
        now = self._peaks(self.plan)
        for rank, needed in enumerate(self._peaks(other)):
            if needed > max(now[rank], self._topology.device_of(rank).memory_bytes):
                return False
        return True

    def _peaks(self, plan: Plan) -> list[float]:
        """Peak bytes of each rank in a step."""
        cost = of_plan(self._profile, plan, self._topology, state_per_weight=self._state)
        timeline = simulate(program_of(plan), cost)
        return list(map(timeline.peak_bytes, range(plan.placement.num_ranks)))

    def _travel_s(self, other: Plan) -> float:
        """Seconds in which weights and optimizer states travel, one layer after the other over the slowest link."""
        before = self.plan.partition.stage_of
        num_bytes = 0.0
        for layer, stage in other.partition.stage_of.items():
            if stage != before[layer]:
                figures = self._profile.layers[layer]
                each = figures.weight_bytes + self._state * figures.wgrad_bytes
                num_bytes += each * len(other.placement.ranks[stage])
        return num_bytes / min(level.bandwidth_bytes_per_s for level in self._topology.levels)


def _why(times: Times, slowness: Sequence[float]) -> str:
    """The rank that takes most time for a micro-batch, and the one that takes least."""
    most_s, (slow, _) = max((seconds, place) for place, seconds in times.items())
    least_s, (quick, _) = min((seconds, place) for place, seconds in times.items())
    ratio = slowness[slow] / min(slowness)
    each = f"rank {slow} takes {format_seconds(most_s)} per micro-batch, rank {quick} {format_seconds(least_s)}"
    return f"{each}; rank {slow} takes {ratio:.1f} × as long for a layer as the fastest rank"


def shape_of(plan: Plan) -> str:
    """The layers of each stage, and the shares of copies, in words.

    >>> from pipefit.planner import by_hand
    >>> shape_of(by_hand(6, num_ranks=2, schedule="1f1b", num_microbatches=4, stages=[5, 1]))
    'stages of 5-1 layers'
    """
    counts = [str(len(stage.layers)) for stage in plan.partition.stages]
    words = f"stages of {'-'.join(counts)} layers"
    if plan.shares:
        shares = map(str, plan.shares)
        words += f", copies with {'-'.join(shares)} micro-batches"
    return words
