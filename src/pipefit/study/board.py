"""The state of a study: where each trial stands and which one is next. It knows nothing of processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipefit.study.simulation import (
    POLICIES,
    SLACK,
    Ready,
    StudyTimeline,
    TimedTurn,
    TrialCost,
    coarser,
    lower_bound_s,
    simulate_study,
)
from pipefit.study.stopping import HELD_OUT, LOSS, Rule, Verdict
from pipefit.study.trial import Admitted, Job, Trial, TurnDone

_ENDED = ("finished", "stopped", "failed")

_AHEAD_S = 0.25
"""A device gets turns for so long ahead, where the policy would choose no other trial: it does not wait for orders."""
_MOST_DEATHS = 2
"""A trial under which so many workers have died fails: it is likely to be the cause."""


@dataclass
class TrialProgress:
    """How far a trial of the study has come.

    Attributes:
        number: in the order of the study.
        trial: its definition.
        name: of its files, too.
        status: "waiting" to be admitted, "ready", "running", "held" at a rung, or how it ended: "finished", "stopped"
            by the rule, "failed".
        reason: why it ended, where it did not finish.
        admitted: its figures; None: it is not built yet.
        step, turn: the next one.
        losses: of each step done.
        held_out: the loss on held-out data after each step; NaN where it was not evaluated.
        device: that had its last turn; −1: none.
        last_turn: when, counted in turns of the study.
        busy_s: seconds of devices that it took.
        moves: how often it changed its device.
        moved_s: of `busy_s`, reading and writing its state.
        deaths: of workers that had it.
        turn_s: mean seconds and number of each turn of a step.
        in_hand: turns that its device has not reported yet.
    """

    number: int
    trial: Trial
    name: str
    status: str = "waiting"
    reason: str = ""
    admitted: Admitted | None = None
    step: int = 0
    turn: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    device: int = -1
    last_turn: int = -1
    busy_s: float = 0.0
    moves: int = 0
    moved_s: float = 0.0
    deaths: int = 0
    turn_s: dict[int, tuple[float, int]] = field(default_factory=dict)
    in_hand: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more turns."""
        return self.status in _ENDED

    @property
    def is_being_admitted(self) -> bool:
        """Whether a device is building it."""
        return self.status == "running" and self.admitted is None

    @property
    def score(self) -> float:
        """The last loss on held-out data, else the mean of the last tenth of the steps' losses; infinite before."""
        if self.trial.evaluate:
            return [math.inf, *self.curve][-1]
        last = self.losses[-max(len(self.losses) // 10, 1) :]
        return sum(last) / len(last) if last else math.inf

    @property
    def curve(self) -> list[float]:
        """For each step done, the last loss on held-out data; infinite before the first."""
        values, last = [], math.inf
        for value in self.held_out:
            last = last if math.isnan(value) else value
            values.append(last)
        return values

    def measured(self, turn: int, seconds: float) -> None:
        """Adds a turn to a mean over the last 16 or so; the first one counts only until there is another."""
        mean, count = self.turn_s.get(turn, (seconds, 0))
        count = min(count + 1, 16)
        self.turn_s[turn] = (mean + (seconds - mean) / count, count) if count > 2 else (seconds, count)

    @property
    def cost(self) -> TrialCost | None:
        """The time of its turns; None until each was measured."""
        if self.admitted is None or len(self.turn_s) < self.admitted.num_turns:
            return None
        return TrialCost(tuple(self.turn_s[k][0] for k in range(self.admitted.num_turns)), self.trial.steps)

    @property
    def remaining_s(self) -> float:
        """Remaining time in isolation; infinite until each of its turns was measured."""
        cost = self.cost
        if cost is None:
            return math.inf
        return sum(cost.turns_s[self.turn :]) + (self.trial.steps - self.step - 1) * sum(cost.turns_s)


class Board:
    """All trials of a study, and the rules by which devices take them."""

    def __init__(
        self, entries: Sequence[TrialProgress], num_devices: int, policy: str, stop: Rule | None = None
    ) -> None:
        self.entries = list(entries)
        self.num_devices, self.policy, self.stop = num_devices, policy, stop
        self.turns: list[TimedTurn] = []
        self.tier_bytes = 0.0
        self._choose = POLICIES[policy]
        self._count = 0
        self.admits_singly = False  # under a limit on the tier, each admission changes the room of the next
        self._sent_back = False  # a trial was, for want of room, and nothing has ended since
        self.on_end: Callable[[TrialProgress], None] = lambda entry: None

    # ---- the next job ----------------------------------------------------------------------------------------------

    def next_job(self, device: int) -> Job | None:
        """The next job of a free device; None: there is none until another one ends."""
        waiting = [entry for entry in self.entries if entry.status == "waiting"]
        if waiting and self._may_begin(device):
            return self._begin(waiting[0], device, "admit")
        offer = [Ready(e.number, e.remaining_s, e.last_turn, e.device) for e in self.entries if e.status == "ready"]
        number = self._choose(offer, device) if offer else None
        if number is None:
            return None
        entry = self.entries[number]
        return self._begin(entry, device, "turn", self._num_turns(entry, offer))

    def _num_turns(self, entry: TrialProgress, offer: Sequence[Ready]) -> int:
        """Turns that a trial takes before the policy chooses again: one step at most where a rule stops trials."""
        assert entry.admitted is not None
        num_turns = entry.admitted.num_turns
        left = num_turns - entry.turn
        cost = entry.cost
        if self.policy == "round-robin":
            return 1
        if cost is None:
            return left
        if self.stop is None:
            left += (entry.trial.steps - entry.step - 1) * num_turns
        most_s = _AHEAD_S
        if self.policy == "lrtf":
            others = [trial.remaining_s for trial in offer if trial.number != entry.number]
            if math.inf in others:
                return 1
            slack_s = SLACK * (entry.remaining_s + sum(others))
            most_s = min(most_s, entry.remaining_s - max(others, default=0.0) + slack_s)
        ends_s = itertools.accumulate(cost.turns_s[(entry.turn + n) % num_turns] for n in range(left))
        return max(1, sum(1 for _ in itertools.takewhile(lambda end_s: end_s <= most_s, ends_s)))

    def _may_begin(self, device: int) -> bool:
        """Whole tasks are admitted one at a time, as devices come free; else all are, so that any can be chosen."""
        if self._sent_back or (self.admits_singly and any(e.is_being_admitted for e in self.entries)):
            return False
        if self.policy != "whole-task":
            return True
        return not any(e.device == device and e.status in ("ready", "running", "held") for e in self.entries)

    def _begin(self, entry: TrialProgress, device: int, kind: str, count: int = 1) -> Job:
        entry.status, entry.in_hand = "running", count
        entry.moves += entry.device not in (-1, device)
        entry.device, entry.last_turn = device, self._count
        self._count += 1
        return Job(kind, entry.number, count)

    @property
    def is_over(self) -> bool:
        """Whether no trial takes another turn."""
        return all(entry.has_ended for entry in self.entries)

    @property
    def alive(self) -> frozenset[int]:
        """The trials that have not ended."""
        return frozenset(entry.number for entry in self.entries if not entry.has_ended)

    # ---- its outcome -------------------------------------------------------------------------------------------

    def admitted(self, number: int, found: Admitted, device: int, start_s: float, end_s: float) -> None:
        """A trial is built; in a study that is resumed it may be in the middle of its steps."""
        entry = self.entries[number]
        entry.admitted, entry.step, entry.turn = found, found.step, found.turn
        entry.busy_s += end_s - start_s
        self.tier_bytes += found.tier_bytes
        self.turns.append(TimedTurn(number, device, -1, 0, start_s, end_s))
        self._settle(entry)

    def sent_back(self, number: int) -> None:
        """There is no room on the tier for a trial now: it waits until another one has ended.

        When no other trial can end, it fails: those that are held at a rung wait for it.
        """
        entry = self.entries[number]
        entry.status, entry.device = "waiting", -1
        self._sent_back = True
        self._fail_for_want_of_room()

    def turned(self, report: TurnDone, device: int) -> None:
        """A turn is committed."""
        entry = self.entries[report.trial]
        assert entry.admitted is not None
        seconds = report.end_s - report.start_s
        entry.busy_s += seconds
        entry.moved_s += report.read_s + report.write_s
        entry.measured(report.turn, seconds)
        self.turns.append(TimedTurn(report.trial, device, report.step, report.turn, report.start_s, report.end_s))
        entry.turn, entry.step = report.turn + 1, report.step
        if entry.turn == entry.admitted.num_turns:
            entry.turn, entry.step = 0, report.step + 1
            entry.losses.append(report.loss)
            entry.held_out.append(report.held_out)
        entry.in_hand -= 1
        if not entry.in_hand:
            self._settle(entry)

    def failed(self, number: int, reason: str) -> None:
        """A trial has failed; the others continue."""
        self._end(self.entries[number], "failed", reason)

    def set_back(self, number: int) -> None:
        """A job was not done, for a reason outside the trial: the trial is where it was before."""
        entry = self.entries[number]
        entry.status, entry.in_hand, entry.device = "ready" if entry.admitted else "waiting", 0, -1

    def lost(
        self, number: int, how: str, step: int, turn: int, losses: Sequence[float], held_out: Sequence[float] = ()
    ) -> None:
        """The worker that had a trial died; the trial is where its last commit left it."""
        entry = self.entries[number]
        entry.deaths += 1
        if entry.deaths >= _MOST_DEATHS:
            self.failed(number, f"{entry.deaths} workers died over it ({how}) at step {entry.step + 1}")
            return
        self.set_back(number)
        if entry.admitted is not None:
            entry.step, entry.turn, entry.losses, entry.held_out = step, turn, list(losses), list(held_out)
            self._settle(entry)

    def _settle(self, entry: TrialProgress) -> None:
        """A trial that has no job now is finished, ready, or subject to the stopping rule."""
        entry.status = "ready"
        if entry.step >= entry.trial.steps:
            self._end(entry, "finished")
            return
        self._apply_rule(entry)
        self._review()
        self._fail_for_want_of_room()

    def _fail_for_want_of_room(self) -> None:
        """Ends a trial that has no room, where only trials that wait for it are left."""
        if not self._sent_back or any(entry.status in ("ready", "running") for entry in self.entries):
            return
        held = sum(entry.status == "held" for entry in self.entries)
        others = f"and {held} of the others wait for it at a rung" if held else "with no other trial there"
        waiting = next(entry for entry in self.entries if entry.status == "waiting")
        self.failed(waiting.number, f"no room on the tier for its state, {others}; give more (memory = …)")

    def _review(self) -> None:
        """Applies the rule again to trials that wait at a rung: others may have come there, or ended."""
        before: list[str] = []
        while before != (before := [entry.status for entry in self.entries]):
            for entry in self.entries:
                if entry.status == "held":
                    self._apply_rule(entry)

    def _apply_rule(self, entry: TrialProgress) -> None:
        if self.stop is None or entry.turn or not entry.losses:
            return
        looks_at_held_out = getattr(self.stop, "on", LOSS) == HELD_OUT
        if looks_at_held_out and math.isnan(entry.held_out[-1]):
            return
        losses = {e.number: e.curve if looks_at_held_out else e.losses for e in self.entries if e.losses}
        verdict = self.stop.judge(entry.number, losses, self.alive)
        if verdict is Verdict.STOP:
            self._end(entry, "stopped", self.stop.why(entry.number, losses))
        else:
            entry.status = "held" if verdict is Verdict.WAIT else "ready"

    def _end(self, entry: TrialProgress, status: str, reason: str = "") -> None:
        entry.status, entry.reason = status, reason
        if entry.admitted is not None:
            self.tier_bytes -= entry.admitted.tier_bytes
        self._sent_back = False
        self.on_end(entry)
        self._review()

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def best(self) -> TrialProgress | None:
        """The finished trial with the lowest score; a stopped one only when none has finished."""
        done = [e for e in self.entries if e.status in ("finished", "stopped") and math.isfinite(e.score)]
        return min(done, key=lambda entry: (entry.status == "stopped", entry.score, entry.number), default=None)

    def measured(self) -> StudyTimeline:
        """The study so far: makespan from the first start to the last end, and the bound for the same work."""
        began = min((turn.start_s for turn in self.turns), default=0.0)
        turns = tuple(
            turn._replace(start_s=turn.start_s - began, end_s=turn.end_s - began)
            for turn in sorted(self.turns, key=lambda turn: turn.end_s)
        )
        bound_s = lower_bound_s([sum(spent) for spent in self._spent()], self.num_devices)
        return StudyTimeline(turns, turns[-1].end_s if turns else 0.0, bound_s)

    def _spent(self) -> list[list[float]]:
        """Seconds of each trial's turns, in their order."""
        spent: list[list[float]] = [[] for _ in self.entries]
        for turn in sorted(self.turns, key=lambda turn: turn.start_s):
            spent[turn.trial].append(turn.end_s - turn.start_s)
        return spent

    def predicted(self, policy: str | None = None) -> StudyTimeline | None:
        """This run, simulated with the mean times of turns so far; None until every trial that continues was measured.

        Trials that failed are left out, stopped ones count with the steps they have done. Steps of an earlier run do
        not count.
        """
        costs = []
        for entry in self.entries:
            if entry.status == "failed" or (entry.has_ended and entry.cost is None):
                continue
            if entry.cost is None or entry.admitted is None:
                return None
            end = entry.step if entry.status == "stopped" else entry.trial.steps
            steps = end - entry.admitted.step
            admission_s = sum(t.end_s - t.start_s for t in self.turns if t.trial == entry.number and t.step < 0)
            costs.append(entry.cost._replace(num_steps=steps, admission_s=admission_s))
        return simulate_study(coarser(costs), self.num_devices, policy or self.policy) if costs else None

    @property
    def left_s(self) -> float:
        """The least time that the study still takes; infinite until every trial was measured."""
        left = [entry.remaining_s for entry in self.entries if not entry.has_ended]
        return lower_bound_s(left, self.num_devices)

    @property
    def done(self) -> float:
        """The share of all steps that are done, or will not be."""
        steps = sum(entry.trial.steps for entry in self.entries)
        return sum(e.trial.steps if e.has_ended else len(e.losses) for e in self.entries) / max(steps, 1)

    def in_hindsight(self, policy: str) -> StudyTimeline:
        """The measured turns, simulated under a policy."""
        costs = coarser([TrialCost(tuple(spent), 1) for spent in self._spent() if spent])
        return simulate_study(costs, self.num_devices, policy)
