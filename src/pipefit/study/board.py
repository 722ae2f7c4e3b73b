"""The state of a study: all trials, and the choice of the next one for a device, independent of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pipefit.study.simulation import (
    POLICIES,
    SLACK,
    Ready,
    StudyTimeline,
    TimedTurn,
    TrialCost,
    coarser,
    lower_bound_s,
    one_by_one_s,
    simulate_study,
)
from pipefit.study.stopping import HELD_OUT, WAIT, Rule
from pipefit.study.trial import Figures, Job, Progress
from pipefit.study.trial_progress import TrialProgress

_AHEAD_S = 0.25
"""Seconds of turns that a device gets at once, where the policy would choose no other trial, to avoid waits."""
_MOST_DEATHS = 2
"""Number of workers' deaths after which their trial fails, because it is likely to be the cause."""


class Board:
    """All trials of a study, and the rules for the next trial of a device.

    Args:
        entries: its trials.
        num_devices: that take turns.
        policy: for the next trial.
        stop: stops trials early.
        on_end: called when a trial has ended.
        admits_singly: each admission changes the space for the next, as under a limit on the tier.

    Attributes:
        entries: its trials; more may be added.
        turns: taken so far, and admissions.
        prediction: of the whole study, once it is known.
    """

    def __init__(
        self,
        entries: Sequence[TrialProgress],
        num_devices: int,
        policy: str,
        stop: Rule | None = None,
        on_end: Callable[[TrialProgress], None] = lambda entry: None,
        admits_singly: bool = False,
    ) -> None:
        self.entries = list(entries)
        self.num_devices = num_devices
        self.policy = policy
        self.turns: list[TimedTurn] = []
        self.prediction: StudyTimeline | None = None
        self._choose = POLICIES[policy]
        self._stop = stop
        self._on_end = on_end
        self._admits_singly = admits_singly
        self._count = 0
        self._sent_back = False  # whether a trial was sent back for lack of space, and nothing has ended since

    # ---- the next job ----------------------------------------------------------------------------------------------

    def next_job(self, device: int) -> Job | None:
        """The next job of a free device; None: there is none until another one ends."""
        known = self._measured_kinds()
        offer = [self._ready(entry, known) for entry in self.entries if self._may_continue(entry)]
        if not offer:
            return None
        number = self._choose(offer, device)
        if number is None:
            return None
        entry = self.entries[number]
        if not entry.is_built:
            return self._begin(entry, device, "admit")
        return self._begin(entry, device, "turn", self._num_turns(entry, offer))

    def _ready(self, entry: TrialProgress, known: Mapping[str, TrialCost]) -> Ready:
        cost = self._expected_cost(entry, known)
        remaining_s = math.inf
        if cost is not None:
            remaining_s = entry.remaining_of(cost)
        return Ready(entry.number, remaining_s, entry.last_turn, entry.device, entry.trial.steps - entry.steps)

    def _measured_kinds(self, least: int = 1) -> dict[str, TrialCost]:
        """The times of turns of each kind of trial, of the first trial whose turns were all measured some times."""
        found: dict[str, TrialCost] = {}
        for entry in self.entries:
            cost = entry.cost
            if cost is not None and min(count for _, count in entry.turn_s.values()) >= least:
                found.setdefault(entry.trial.kind, cost)
        return found

    def _expected_cost(self, entry: TrialProgress, known: Mapping[str, TrialCost]) -> TrialCost | None:
        """The time of a trial's turns: its own, or else that of its kind; None: neither was measured."""
        cost = entry.cost or known.get(entry.trial.kind)
        if cost is None:
            return None
        return cost._replace(num_steps=entry.trial.steps)

    def _may_continue(self, entry: TrialProgress) -> bool:
        """Returns whether a trial could take a turn now, or be admitted."""
        if entry.status != "waiting":
            return entry.status == "ready"
        if self._sent_back:
            return False
        is_admitting = any(other.status == "running" and not other.is_built for other in self.entries)
        return not (self._admits_singly and is_admitting)

    def _num_turns(self, entry: TrialProgress, offer: Sequence[Ready]) -> int:
        """Turns of a trial before the policy chooses again: at most one step where a rule stops trials."""
        num_turns = entry.num_turns
        left = num_turns - entry.turn
        cost = entry.cost
        if self.policy == "round-robin":
            return 1
        if cost is None:
            return left
        if self._stop is None:
            left += (entry.trial.steps - entry.steps - 1) * num_turns
        most_s = _AHEAD_S
        if self.policy == "lrtf":
            others = [trial.remaining_s for trial in offer if trial.number != entry.number]
            if math.inf in others:
                return 1
            own_s = entry.remaining_of(cost)
            slack_s = SLACK * (own_s + sum(others))
            most_s = min(most_s, own_s - max(others, default=0.0) + slack_s)
        count = 0
        end_s = 0.0
        while count < left:
            end_s += cost.turns_s[(entry.turn + count) % num_turns]
            if end_s > most_s:
                break
            count += 1
        return max(1, count)

    def _begin(self, entry: TrialProgress, device: int, kind: str, count: int = 1) -> Job:
        entry.status = "running"
        entry.moves += entry.device not in (-1, device)
        entry.device = device
        entry.last_turn = self._count
        self._count += 1
        return Job(kind, entry.number, count)

    @property
    def is_over(self) -> bool:
        """Returns whether no trial takes another turn."""
        return all(entry.has_ended for entry in self.entries)

    @property
    def alive(self) -> frozenset[int]:
        """The trials that have not ended."""
        return frozenset(entry.number for entry in self.entries if not entry.has_ended)

    @property
    def tier_bytes(self) -> int:
        """Bytes on the tier of the trials that continue."""
        return sum(entry.tier_bytes for entry in self.entries if not entry.has_ended)

    # ---- its outcome -------------------------------------------------------------------------------------------

    def book(self, turns: Sequence[TimedTurn]) -> None:
        """Records committed turns, or admissions; `settle` then decides whether the trial gets further ones."""
        self.turns += turns
        for turn in turns:
            entry = self.entries[turn.trial]
            entry.busy_s += turn.seconds
            entry.moved_s += turn.moved_s
            if turn.step < 0:
                continue
            entry.measured(turn.turn, turn.seconds)
            entry.turn = (turn.turn + 1) % entry.num_turns
            if not entry.turn:
                entry.losses.append(turn.loss)
                if not math.isnan(turn.held_out):
                    entry.held_out.append((entry.steps, turn.held_out))

    def admitted(self, number: int, figures: Figures, found: Progress) -> None:
        """A trial is built; in a study that is resumed it may be in the middle of its steps."""
        entry = self.entries[number]
        vars(entry).update(msgspec.structs.asdict(figures))
        entry.stands_at(found)
        entry.first_step = entry.steps
        self.settle(number)

    def sent_back(self, number: int) -> None:
        """Lets a trial without space on the tier wait until another one has ended.

        When no other trial can end, it fails: those that are held at a rung wait for it.
        """
        entry = self.entries[number]
        entry.status = "waiting"
        entry.device = -1
        self._sent_back = True
        self._fail_for_want_of_room()

    def failed(self, number: int, reason: str) -> None:
        """A trial has failed; the others continue."""
        self._end(self.entries[number], "failed", reason)

    def set_back(self, number: int) -> None:
        """Restores a trial whose job was not done, for a reason outside the trial."""
        entry = self.entries[number]
        entry.status = "ready" if entry.is_built else "waiting"
        entry.device = -1

    def lost(self, number: int, how: str, found: Progress) -> None:
        """Restores a trial whose worker died, at its last commit."""
        entry = self.entries[number]
        entry.deaths += 1
        if entry.deaths >= _MOST_DEATHS:
            self.failed(number, f"{entry.deaths} workers died over it ({how}) at step {entry.steps + 1}")
            return
        self.set_back(number)
        if entry.is_built:
            entry.stands_at(found)
            self.settle(number)

    def settle(self, number: int) -> None:
        """After a job: the trial is finished, ready, or subject to the stopping rule."""
        entry = self.entries[number]
        entry.status = "ready"
        if entry.steps >= entry.trial.steps:
            self._end(entry, "finished")
            return
        self._apply_rule(entry)
        self._review()
        self._fail_for_want_of_room()

    def _fail_for_want_of_room(self) -> None:
        """Ends a trial without space, where only trials that wait for it are left."""
        if not self._sent_back or any(entry.status in ("ready", "running") for entry in self.entries):
            return
        held = sum(entry.status == "held" for entry in self.entries)
        if held:
            others = f"and {held} of the others wait for it at a rung"
        else:
            others = "with no other trial there"
        waiting = next(entry for entry in self.entries if entry.status == "waiting")
        self.failed(waiting.number, f"no room on the tier for its state, {others}; give more (memory = …)")

    def _review(self) -> None:
        """Applies the rule again to trials that wait at a rung: others may have reached it, or ended."""
        before: list[str] = []
        while before != (before := [entry.status for entry in self.entries]):
            for entry in self.entries:
                if entry.status == "held":
                    self._apply_rule(entry)

    def _apply_rule(self, entry: TrialProgress) -> None:
        if self._stop is None or entry.turn or not entry.losses:
            return
        looks_at_held_out = self._stop.on == HELD_OUT
        if looks_at_held_out and entry.steps not in dict(entry.held_out):
            return
        losses = {e.number: e.curve if looks_at_held_out else e.losses for e in self.entries if e.losses}
        verdict = self._stop.judge(entry.number, losses, self.alive)
        if verdict is None:
            entry.status = "ready"
        elif verdict == WAIT:
            entry.status = "held"
        else:
            self._end(entry, "stopped", verdict)

    def _end(self, entry: TrialProgress, status: str, reason: str = "") -> None:
        entry.status = status
        entry.reason = reason
        self._sent_back = False
        self._on_end(entry)
        self._review()

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def best(self) -> TrialProgress | None:
        """The finished trial with the lowest score; a stopped one only when none has finished."""
        done = [e for e in self.entries if e.status in ("finished", "stopped") and e.score is not None]
        return min(done, key=lambda entry: (entry.status == "stopped", entry.score, entry.number), default=None)

    def measured(self) -> StudyTimeline:
        """The study so far: makespan from the first start to the last end, and the bound for the same work."""
        began = min((turn.start_s for turn in self.turns), default=0.0)
        turns = []
        makespan_s = 0.0
        for turn in sorted(self.turns, key=lambda turn: turn.end_s):
            makespan_s = turn.end_s - began
            turns.append(turn._replace(start_s=turn.start_s - began, end_s=makespan_s))
        totals_s = [sum(spent) for spent in self._spent()]
        return StudyTimeline(tuple(turns), makespan_s, lower_bound_s(totals_s, self.num_devices))

    def _spent(self) -> list[list[float]]:
        """Seconds of each trial's turns, in their order."""
        spent: list[list[float]] = [[] for _ in self.entries]
        for turn in sorted(self.turns, key=lambda turn: turn.start_s):
            spent[turn.trial].append(turn.seconds)
        return spent

    def predict(self) -> None:
        """Simulates the whole study once a trial of every kind was measured twice, because first turns are slow."""
        if self.prediction is not None:
            return
        known = self._measured_kinds(least=2)
        kinds = {entry.trial.kind for entry in self.entries if not entry.has_ended}
        if kinds and kinds <= known.keys():
            self.prediction = self.predicted()

    def predicted(self) -> StudyTimeline | None:
        """This run, simulated with the mean times of turns so far; None until a trial of every kind was measured.

        Trials that failed are left out, stopped ones count with the steps they have done. Steps of an earlier run do
        not count.
        """
        known = self._measured_kinds()
        admissions = self._admissions_s()
        usual_s = sum(admissions.values()) / max(len(admissions), 1)
        costs = []
        for entry in self.entries:
            cost = self._expected_cost(entry, known)
            if entry.status == "failed" or (entry.has_ended and entry.cost is None):
                continue
            if cost is None:
                return None
            end = entry.trial.steps
            if entry.status == "stopped":
                end = entry.steps
            admission_s = admissions.get(entry.number, 0.0 if entry.has_ended else usual_s)
            costs.append(cost._replace(num_steps=end - entry.first_step, admission_s=admission_s))
        if costs:
            return simulate_study(coarser(costs), self.num_devices, self.policy)
        return None

    def _admissions_s(self) -> dict[int, float]:
        """Seconds of the admissions so far, by trial."""
        found: dict[int, float] = {}
        for turn in self.turns:
            if turn.step < 0:
                found[turn.trial] = found.get(turn.trial, 0.0) + turn.seconds
        return found

    def remaining_s(self, entry: TrialProgress) -> float:
        """Remaining seconds of a trial in isolation; infinite until one of its kind was measured."""
        return self._ready(entry, self._measured_kinds()).remaining_s

    @property
    def left_s(self) -> float:
        """Lower bound of the remaining seconds of the study; infinite until a trial of every kind was measured."""
        known = self._measured_kinds()
        left = [self._ready(entry, known).remaining_s for entry in self.entries if not entry.has_ended]
        return lower_bound_s(left, self.num_devices)

    @property
    def done(self) -> float:
        """The share of all steps that are done, or will be skipped."""
        steps = sum(entry.trial.steps for entry in self.entries)
        done = sum(entry.trial.steps if entry.has_ended else entry.steps for entry in self.entries)
        return done / max(steps, 1)

    def in_hindsight(self, policy: str) -> StudyTimeline:
        """The measured turns, simulated under a policy."""
        costs = coarser([TrialCost(tuple(spent), 1) for spent in self._spent() if spent])
        return simulate_study(costs, self.num_devices, policy)

    def one_by_one(self) -> dict[str, float]:
        """Seconds of the measured turns, if every trial in turn had all devices: as GPipe, and naively."""
        totals = [sum(spent) for spent in self._spent()]
        stages = [min(entry.shards or 1, self.num_devices) for entry in self.entries]
        counts = [entry.trial.microbatches for entry in self.entries]
        ones = [1] * len(counts)
        return {"gpipe": one_by_one_s(totals, stages, counts), "naive": one_by_one_s(totals, stages, ones)}


Observer = Callable[[Board], None]
"""A function that a study calls after each event."""
