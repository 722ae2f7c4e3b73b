"""The state of a study: who is where, who is next. Knows nothing of processes, so that every course can be tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipefit.study.entry import Admitted, Entry, Job, Report
from pipefit.study.policies import POLICIES, SLACK, Ready
from pipefit.study.simulation import Outcome, TrialCost, Turn, coarser, lower_bound_s, simulate_study
from pipefit.study.stopping import HELD_OUT, LOSS, Rule, Verdict

__all__ = ["Board"]

AHEAD_S = 0.25
"""A device is told its turns for so long ahead, where the policy would not change its mind: it never waits then."""
_MOST_DEATHS = 2
"""A trial under which so many workers have died fails: it is likely to be the cause."""


class Board:
    """All trials of a study, and the rules by which devices take them."""

    def __init__(self, entries: Sequence[Entry], num_devices: int, policy: str, stop: Rule | None = None) -> None:
        self.entries = list(entries)
        self.num_devices, self.policy, self.stop = num_devices, policy, stop
        self.turns: list[Turn] = []
        self.tier_bytes = 0.0
        self._choose = POLICIES[policy]
        self._count = 0
        self.admits_singly = False  # where the room on the tier is counted, it must be known who has some
        self._sent_back = False  # a trial was, for want of room, and nothing has ended since
        self.on_end: Callable[[Entry], None] = lambda entry: None

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

    def _in_a_row(self, entry: Entry, offer: Sequence[Ready]) -> int:
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

    def _begin(self, entry: Entry, device: int, kind: str, count: int = 1) -> Job:
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
        self.turns.append(Turn(number, device, -1, 0, start_s, end_s))
        self._settle(entry)

    def sent_back(self, number: int) -> None:
        """There is no room on the tier for a trial now: it waits until another one has ended.

        When nobody is there whose end it could wait for, it fails; those who are held at a rung wait for it in turn.
        """
        entry = self.entries[number]
        entry.status, entry.device = "waiting", -1
        self._sent_back = True
        self._end_who_waits_in_vain()

    def turned(self, report: Report, device: int) -> None:
        """A turn is committed."""
        entry = self.entries[report.trial]
        assert entry.admitted is not None
        seconds = report.end_s - report.start_s
        entry.busy_s += seconds
        entry.moved_s += report.read_s + report.write_s
        entry.measured(report.turn, seconds)
        self.turns.append(Turn(report.trial, device, report.step, report.turn, report.start_s, report.end_s))
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

    def _settle(self, entry: Entry) -> None:
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

    def _judge(self, entry: Entry) -> None:
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

    def _end(self, entry: Entry, status: str, reason: str = "") -> None:
        entry.status, entry.reason = status, reason
        if entry.admitted is not None:
            self.tier_bytes -= entry.admitted.tier_bytes
        self._sent_back = False
        self.on_end(entry)
        self.review()

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def best(self) -> Entry | None:
        """The finished trial with the lowest score; a stopped one only when none has finished."""
        done = [e for e in self.entries if e.status == "finished" and math.isfinite(e.score)]
        done = done or [e for e in self.entries if e.status == "stopped" and math.isfinite(e.score)]
        return min(done, key=lambda entry: (entry.score, entry.number), default=None)

    def measured(self) -> Outcome:
        """The study so far: makespan from the first start to the last end, and the bound for the same work."""
        turns = sorted(self.turns, key=lambda turn: turn.end_s)
        if not turns:
            return Outcome((), 0.0, 0.0)
        began = min(turn.start_s for turn in turns)
        moved = tuple(turn._replace(start_s=turn.start_s - began, end_s=turn.end_s - began) for turn in turns)
        totals = [0.0] * len(self.entries)
        for turn in turns:
            totals[turn.trial] += turn.end_s - turn.start_s
        return Outcome(moved, moved[-1].end_s, lower_bound_s(totals, self.num_devices))

    def predicted(self, policy: str | None = None) -> Outcome | None:
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

    def in_hindsight(self, policy: str) -> Outcome:
        """The same turns on paper, each as long as it was, under a policy."""
        spent: list[list[float]] = [[] for _ in self.entries]
        for turn in sorted(self.turns, key=lambda turn: (turn.trial, turn.start_s)):
            spent[turn.trial].append(turn.end_s - turn.start_s)
        costs = coarser([TrialCost(tuple(own), 1) for own in spent if own])
        return simulate_study(costs, self.num_devices, policy)

    def _admission_s(self, entry: Entry) -> float:
        return sum(t.end_s - t.start_s for t in self.turns if t.trial == entry.number and t.step < 0)
