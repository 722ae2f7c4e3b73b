"""When layers move: a policy over windows of a run's steps, a pure function of the times that all ranks have measured.

    window      1        2        3        4 ─ move ─ 5         6        7
    times     learn   compare  compare  compare     skipped    learn   compare
                                └── both gain ──┘

A window holds the medians of some steps, so one bad step is not seen. Another plan is taken where all of this holds:

- by the times of this window and by those of the window before, it is faster by more than the least gain, and by more
  than some times the noise of the measurement: what passes within a window moves nothing;
- its gain over the steps that are left is more than the cost of the move;
- it is none that the run has left, unless a rank has changed its speed by a quarter since, or its steps took less time;
- after a move that has not brought half of its gain, some windows have passed; twice as many each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pipefit.errors import ScheduleError
from pipefit.planner.better_plan import assumed, loads, others, step_s
from pipefit.planner.running_costs import Factors, Place, RunningCosts
from pipefit.spec import Plan, Profile, Topology
from pipefit.units import format_seconds

LEAST_GAIN: Final = 0.05
"""The least part of a step's time for which layers move."""

_NOISES = 2.0
_MEASURED, _COUNTED = 0.1, 0.5
"""Relative errors of the costs of layers: measured in isolation, and by FLOP and parameters."""
_CHANGED = 1.25
_MOST_PAUSE = 15


class Window(NamedTuple):
    """Measurements of some steps that followed each other.

    Attributes:
        step: the last of them.
        times: median seconds per micro-batch of each stage on each of its ranks, forward and backward.
        noise: relative standard error of these medians, the largest.
        period_s: median seconds from step to step.
        steps_left: of the run.
        build_s: seconds in which a pipeline is built and its program proved, without the bytes that travel.
    """

    step: int
    times: Mapping[Place, float]
    noise: float
    period_s: float
    steps_left: int
    build_s: float


@dataclass(frozen=True)
class Move:
    """A move that pays.

    Attributes:
        plan: after it.
        step: after which it was decided.
        what: the layers or shares that change, in words.
        why: its reason in words.
        gain: the part of a step's time that it is predicted to save.
        before_s: measured seconds of a step.
        after_s: predicted seconds of a step.
        travel_s: predicted seconds in which its bytes travel.
    """

    plan: Plan
    step: int
    what: str
    why: str
    gain: float
    before_s: float
    after_s: float
    travel_s: float

    def __str__(self) -> str:
        times = f"{format_seconds(self.before_s)} → {format_seconds(self.after_s)} per step"
        return f"after step {self.step}: {self.what}; {self.why}; predicted: {times} ({-self.gain:.0%})"


class _Left(NamedTuple):
    """A plan that ran before: its estimate, and the seconds of its steps, when the run left it."""

    plan: Plan
    factors: Factors
    period_s: float


class Rebalance:
    """The policy of one run; every rank that is given the same windows decides the same.

    Args:
        plan: that runs.
        profile: of the layers, at the micro-batch size of the run.
        topology: the links between the ranks.
        is_measured: whether the profile's seconds were measured; else they count FLOP and parameters.
        state_per_weight: bytes of optimizer states for each byte of weights.
    """

    def __init__(
        self, plan: Plan, profile: Profile, topology: Topology, is_measured: bool, state_per_weight: float = 2.0
    ) -> None:
        self.plan = plan
        self._profile = profile
        self._topology = topology
        self._state = state_per_weight
        if is_measured:
            spread = _MEASURED
        else:
            spread = _COUNTED
        self._costs = RunningCosts(assumed(profile, plan), plan.placement.num_ranks, spread)
        self._now = Factors((), ())
        self._earlier: Factors | None = None
        self._reference: Factors | None = None
        self._last: Move | None = None
        self._left: list[_Left] = []
        self._has_moved = False
        self._skips = False
        self._pause = 0
        self._waits = 0

    def look(self, window: Window) -> Move | None:
        """Takes a window; returns the move that pays, None: none does."""
        if self._skips:
            self._skips = False
            return None
        stages = [stage.layers for stage in self.plan.partition.stages]
        now = self._costs.observe(window.times, stages, window.noise, self._has_moved)
        if self._has_moved:
            self._judge(window)
        self._has_moved = False
        earlier = self._earlier
        self._earlier = self._now = now
        if self._reference is None:
            self._reference = now
        if earlier is None:
            return None
        if self._waits:
            self._waits -= 1
            return None
        return self._best(window, earlier, now)

    def moved(self, move: Move) -> None:
        """Notes a move that was made: the first window after it is not measured."""
        self._left.append(_Left(self.plan, self._now, move.before_s))
        self._reference = None
        self.plan = move.plan
        self._last = move
        self._has_moved = True
        self._earlier = None
        self._reference = None
        self._waits = self._pause

    def _judge(self, window: Window) -> None:
        """Waits longer after the next move where the last one has not brought half of what was predicted."""
        last = self._last
        assert last is not None
        if last.before_s - window.period_s < (last.before_s - last.after_s) / 2:
            self._pause = min(2 * self._pause + 1, _MOST_PAUSE)
        else:
            self._pause = 0
        self._waits = self._pause

    def _best(self, window: Window, earlier: Factors, now: Factors) -> Move | None:
        least = max(LEAST_GAIN, _NOISES * window.noise)
        found: list[Move] = []
        for other in others(self.plan, self._profile, now):
            if self._is_behind(other, now, (1 - least) * window.period_s):
                continue
            gain = min(self._gain(other, now, least), self._gain(other, earlier, least))
            travel_s = self._travel_s(other)
            saved_s = gain * window.period_s * window.steps_left
            if gain > least and saved_s > window.build_s + travel_s:
                found.append(self._move(window, other, gain, travel_s, now))
        return max(found, key=lambda move: move.gain, default=None)

    def _is_behind(self, other: Plan, now: Factors, most_s: float) -> bool:
        """Returns whether the run has left this plan, at the speeds of now, with steps of more than `most_s`."""
        for left in self._left:
            has_changed = any(map(_differ, now.slowness, left.factors.slowness))
            if left.plan == other and not has_changed and left.period_s > most_s:
                return True
        return False

    def _gain(self, other: Plan, factors: Factors, least: float) -> float:
        """The part of a step that another plan saves; 0: not more than `least` of the work of the busiest rank."""
        if max(loads(other, factors)) > (1 - least) * max(loads(self.plan, factors)):
            return 0.0
        try:
            after = step_s(other, self._profile, self._topology, factors)
        except ScheduleError:  # the schedule has no program for these shares
            return 0.0
        return 1 - after / step_s(self.plan, self._profile, self._topology, factors)

    def _travel_s(self, other: Plan) -> float:
        """Seconds in which weights and optimizer states travel, one layer after the other."""
        seconds = 0.0
        for layer, (source, target) in moves_between(self.plan, other).items():
            sizes = self._profile.layers[layer]
            num_bytes = sizes.weight_bytes + self._state * sizes.wgrad_bytes
            first = self.plan.placement.ranks[source][0]
            for rank in self.plan.placement.ranks[target]:
                level = self._topology.level_between(first, rank)
                seconds += level.latency_s + num_bytes / level.bandwidth_bytes_per_s
        return seconds

    def _move(self, window: Window, other: Plan, gain: float, travel_s: float, now: Factors) -> Move:
        after_s = window.period_s * (1 - gain)
        what = changes(self.plan, other)
        return Move(other, window.step, what, self._why(now), gain, window.period_s, after_s, travel_s)

    def _why(self, now: Factors) -> str:
        """The rank that became slow, or else the one that has most to do."""
        assert self._reference is not None
        pairs = zip(now.slowness, self._reference.slowness, strict=True)
        ratios = [new / old for new, old in pairs]
        work = loads(self.plan, now)
        busiest = work.index(max(work))
        each = f"rank {busiest} works {format_seconds(max(work))} per step, the least busy {format_seconds(min(work))}"
        changed = max(range(len(ratios)), key=lambda rank: max(ratios[rank], 1 / ratios[rank]))
        if ratios[changed] >= _CHANGED:
            return f"rank {changed} takes {ratios[changed]:.1f} × as long as before; {each}"
        if ratios[changed] <= 1 / _CHANGED:
            return f"rank {changed} is {1 / ratios[changed]:.1f} × as fast as before; {each}"
        return each


def _differ(new: float, old: float) -> bool:
    return max(new / old, old / new) >= _CHANGED


def moves_between(plan: Plan, other: Plan) -> dict[int, tuple[int, int]]:
    """The stage before and after of each layer that another plan has in another stage."""
    before = plan.partition.stage_of
    after = other.partition.stage_of
    return {layer: (before[layer], after[layer]) for layer in sorted(before) if before[layer] != after[layer]}


def changes(plan: Plan, other: Plan) -> str:
    """The layers that move, and the shares that change, in words.

    >>> from pipefit.planner import by_hand
    >>> two = by_hand(6, num_ranks=2, schedule="1f1b", num_microbatches=4)
    >>> other = by_hand(6, num_ranks=2, schedule="1f1b", num_microbatches=4, stages=[5, 1])
    >>> changes(two, other)
    'layers 3 to 4 move from stage 1 to stage 0'
    """
    words = []
    of_way: dict[tuple[int, int], list[int]] = {}
    for layer, way in moves_between(plan, other).items():
        of_way.setdefault(way, []).append(layer)
    for (source, target), layers in of_way.items():
        words.append(f"{_named(layers)} from stage {source} to stage {target}")
    if plan.shares != other.shares:
        count = plan.num_microbatches
        equal = [count // plan.data] * plan.data
        shares = [_listed(one.shares or equal) for one in (plan, other)]
        words.append(f"the copies take {shares[1]} micro-batches in place of {shares[0]}")
    return ", ".join(words)


def _named(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]} moves"
    return f"layers {layers[0]} to {layers[-1]} move"


def _listed(shares: Sequence[int]) -> str:
    return "-".join(map(str, shares))
