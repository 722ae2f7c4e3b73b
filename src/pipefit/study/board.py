"""The state of a study: who is where, who is next. Knows nothing of processes, so that every course can be tested."""

from __future__ import annotations

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

__all__ = ["Board", "TrialProgress"]

_ENDED = ("finished", "stopped", "failed")

AHEAD_S = 0.25
"""A device is told its turns for so long ahead, where the policy would not change its mind: it never waits then."""
_MOST_DEATHS = 2
"""A trial under which so many workers have died fails: it is likely to be the cause."""


@dataclass
class TrialProgress:
    """A trial of the study.

    Attributes:
        number: in the order of the study.
        trial: what it is.
        status: "waiting" to be admitted, "ready", "running", "held" at a rung, or how it ended: "finished", "stopped"
            by the rule, "failed".
        reason: why it ended, where it did not finish.
        admitted: what is known since it was built.
        step, turn: the next one.
        losses: one per step done.
        held_out: the loss on held-out data after each step; NaN where it was not evaluated.
        device: that had its last turn; −1: none.
        last_turn: when, counted in turns of the study.
        busy_s: seconds of devices it took.
        moves: how often another device took it over.
        moved_s: of `busy_s`, reading and writing its state.
        deaths: of workers that had it.
        turn_s: mean seconds and number of each turn of a step.
        in_hand: turns that its device was told and has not reported.
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
            return ([math.inf, *self.curve])[-1]
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
        """Remembers how long a turn took; the first of its kind is forgotten once there is another."""
        mean, count = self.turn_s.get(turn, (0.0, 0))
        self.turn_s[turn] = _average(mean, count, seconds) if count > 1 else (seconds, count + 1)

    @property
    def cost(self) -> TrialCost | None:
        """What its turns cost, as far as measured; None before all of them were."""
        if self.admitted is None or len(self.turn_s) < self.admitted.num_turns:
            return None
        return TrialCost(tuple(self.turn_s[k][0] for k in range(self.admitted.num_turns)), self.trial.steps)

    @property
    def remaining_s(self) -> float:
        """How long it would still take alone; infinite until each of its turns was measured."""
        cost = self.cost
        if cost is None:
            return math.inf
        return sum(cost.turns_s[self.turn :]) + (self.trial.steps - self.step - 1) * sum(cost.turns_s)


def _average(mean: float, count: int, seconds: float) -> tuple[float, int]:
    """A mean that follows what the machine does now: at most the last 16 or so count."""
    count = min(count + 1, 16)
    return mean + (seconds - mean) / count, count


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
        self.admits_singly = False  # where the room on the tier is counted, it must be known who has some
        self._sent_back = False  # a trial was, for want of room, and nothing has ended since
        self.on_end: Callable[[TrialProgress], None] = lambda entry: None

    # ---- what next -------------------------------------------------------------------------------------------------

    def next_job(self, device: int) -> Job | None:
        """What a free device does now; None: nothing, until something else ends."""
        waiting = [entry for entry in self.entries if entry.status == "waiting"]
        if waiting and self._may_begin(device):
            return self._begin(waiting[0], device, "admit")
        offer = [Ready(e.number, e.remaining_s, e.last_turn, e.device) for e in self.entries if e.status == "ready"]
        number = self._choose(offer, device) if offer else None
        if number is None:
            return None
        entry = self.entries[number]
        return self._begin(entry, device, "turn", self._in_a_row(entry, offer))

    def _in_a_row(self, entry: TrialProgress, offer: Sequence[Ready]) -> int:
        """How many turns a trial takes before the policy is asked again; a rule judges after every step."""
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
        most_s = AHEAD_S
        if self.policy == "lrtf":
            others = [trial.remaining_s for trial in offer if trial.number != entry.number]
            if math.inf in others:
                return 1
            slack_s = SLACK * (entry.remaining_s + sum(others))
            most_s = min(most_s, entry.remaining_s - max(others, default=0.0) + slack_s)
        count, seconds = 1, cost.turns_s[entry.turn]
        while count < left and seconds + cost.turns_s[(entry.turn + count) % num_turns] <= most_s:
            seconds += cost.turns_s[(entry.turn + count) % num_turns]
            count += 1
        return count

    def _may_begin(self, device: int) -> bool:
        """Whole tasks are admitted one by one, as devices come free; else all are, so that any can be chosen."""
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
        return Job(kind, entry.number, *((entry.step, entry.turn) if kind == "turn" else (-1, 0)), count)

    @property
    def is_over(self) -> bool:
        """Whether no trial takes another turn."""
        return all(entry.has_ended for entry in self.entries)

    @property
    def alive(self) -> set[int]:
        """The trials that have not ended."""
        return {entry.number for entry in self.entries if not entry.has_ended}

    # ---- what came of it -------------------------------------------------------------------------------------------

    def admitted(self, number: int, what: Admitted, device: int, start_s: float, end_s: float) -> None:
        """A trial is built; it may stand in the middle already, when the study goes on from earlier."""
        entry = self.entries[number]
        entry.admitted, entry.step, entry.turn = what, what.step, what.turn
        entry.busy_s += end_s - start_s
        self.tier_bytes += what.tier_bytes
        self.turns.append(TimedTurn(number, device, -1, 0, start_s, end_s))
        self._settle(entry)

    def sent_back(self, number: int) -> None:
        """There is no room on the tier for a trial now: it waits until another one has ended.

        When nobody is there whose end it could wait for, it fails; those who are held at a rung wait for it in turn.
        """
        entry = self.entries[number]
        entry.status, entry.device = "waiting", -1
        self._sent_back = True
        self._end_who_waits_in_vain()

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
        """A trial has failed; the others go on."""
        self._end(self.entries[number], "failed", reason)

    def set_back(self, number: int) -> None:
        """A turn did not come about, through nobody's fault: the trial stands before it."""
        entry = self.entries[number]
        entry.status, entry.in_hand, entry.device = "ready" if entry.admitted else "waiting", 0, -1

    def lost(
        self,
        number: int,
        what: str,
        step: int,
        turn: int,
        losses: Sequence[float],
        held_out: Sequence[float] = (),
    ) -> None:
        """The worker that had a trial died; the trial stands where its last commit left it."""
        entry = self.entries[number]
        entry.deaths += 1
        if entry.deaths >= _MOST_DEATHS:
            self.failed(number, f"{entry.deaths} workers died over it ({what}) at step {entry.step + 1}")
            return
        entry.device = -1
        if entry.admitted is None:
            entry.status = "waiting"
            return
        entry.step, entry.turn, entry.losses = step, turn, list(losses)
        entry.held_out = list(held_out)
        self._settle(entry)

    def _settle(self, entry: TrialProgress) -> None:
        entry.status = "ready"
        if entry.step >= entry.trial.steps:
            self._end(entry, "finished")
            return
        self._judge(entry)
        self.review()
        self._end_who_waits_in_vain()

    def _end_who_waits_in_vain(self) -> None:
        if not self._sent_back or any(entry.status in ("ready", "running") for entry in self.entries):
            return
        there = sum(entry.status == "held" for entry in self.entries)
        others = f"and {there} of the others wait for it at a rung" if there else "with no other trial there"
        waiting = next(entry for entry in self.entries if entry.status == "waiting")
        self.failed(waiting.number, f"no room on the tier for its state, {others}; give more (memory = …)")

    def review(self) -> None:
        """Trials that wait at a rung are judged again: others may have come there, or ended."""
        changed = True
        while changed:
            before = [entry.status for entry in self.entries]
            for entry in self.entries:
                if entry.status == "held":
                    self._judge(entry)
            changed = before != [entry.status for entry in self.entries]

    def _judge(self, entry: TrialProgress) -> None:
        if self.stop is None or entry.turn or not entry.losses:
            return
        losses = {e.number: e.losses for e in self.entries if e.losses}
        if getattr(self.stop, "on", LOSS) == HELD_OUT:
            if math.isnan(entry.held_out[-1]):
                return
            losses = {e.number: e.curve for e in self.entries if e.losses}
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
        self.review()

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def best(self) -> TrialProgress | None:
        """The finished trial with the lowest score; a stopped one only when none has finished."""
        done = [e for e in self.entries if e.status == "finished" and math.isfinite(e.score)]
        done = done or [e for e in self.entries if e.status == "stopped" and math.isfinite(e.score)]
        return min(done, key=lambda entry: (entry.score, entry.number), default=None)

    def measured(self) -> StudyTimeline:
        """The study so far: makespan from the first start to the last end, and the bound for the same work."""
        turns = sorted(self.turns, key=lambda turn: turn.end_s)
        if not turns:
            return StudyTimeline((), 0.0, 0.0)
        began = min(turn.start_s for turn in turns)
        moved = tuple(turn._replace(start_s=turn.start_s - began, end_s=turn.end_s - began) for turn in turns)
        totals = [0.0] * len(self.entries)
        for turn in turns:
            totals[turn.trial] += turn.end_s - turn.start_s
        return StudyTimeline(moved, moved[-1].end_s, lower_bound_s(totals, self.num_devices))

    def predicted(self, policy: str | None = None) -> StudyTimeline | None:
        """This run on paper, from what turns have cost so far; None until every living trial was measured.

        Trials that failed are left out, stopped ones count with the steps they have done. What an earlier run has done
        does not count.
        """
        costs = []
        for entry in self.entries:
            if entry.status == "failed" or (entry.has_ended and entry.cost is None):
                continue
            if entry.cost is None or entry.admitted is None:
                return None
            end = entry.step if entry.status == "stopped" else entry.trial.steps
            steps = end - entry.admitted.step
            costs.append(entry.cost._replace(num_steps=steps, admission_s=self._admission_s(entry)))
        return simulate_study(coarser(costs), self.num_devices, policy or self.policy) if costs else None

    @property
    def left_s(self) -> float:
        """How long the study still takes at least; infinite until every trial was measured."""
        left = [entry.remaining_s for entry in self.entries if not entry.has_ended]
        return lower_bound_s(left, self.num_devices)

    @property
    def done(self) -> float:
        """The share of all steps that are done, or will not be."""
        steps = sum(entry.trial.steps for entry in self.entries)
        return sum(e.trial.steps if e.has_ended else len(e.losses) for e in self.entries) / max(steps, 1)

    def in_hindsight(self, policy: str) -> StudyTimeline:
        """The same turns on paper, each as long as it was, under a policy."""
        spent: list[list[float]] = [[] for _ in self.entries]
        for turn in sorted(self.turns, key=lambda turn: (turn.trial, turn.start_s)):
            spent[turn.trial].append(turn.end_s - turn.start_s)
        costs = coarser([TrialCost(tuple(own), 1) for own in spent if own])
        return simulate_study(costs, self.num_devices, policy)

    def _admission_s(self, entry: TrialProgress) -> float:
        return sum(t.end_s - t.start_s for t in self.turns if t.trial == entry.number and t.step < 0)
