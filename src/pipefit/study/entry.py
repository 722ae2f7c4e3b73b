"""What a board knows of a trial, and what it and the devices tell each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.study.simulation import TrialCost
from pipefit.study.trial import Trial

__all__ = ["Admitted", "Entry", "Job", "Report"]

_ENDED = ("finished", "stopped", "failed")


class Admitted(NamedTuple):
    """What is known of a trial once it is built.

    Attributes:
        num_turns: of one step.
        num_shards: it was cut into.
        parameters: of the model.
        tier_bytes: it takes on the tier.
        device_bytes: its largest shard needs on the device, by the profile; 0 where none was made.
        step, turn: where it stands: in the middle, when the study goes on from earlier.
    """

    num_turns: int
    num_shards: int
    parameters: int
    tier_bytes: int
    device_bytes: float = 0.0
    step: int = 0
    turn: int = 0


class Job(NamedTuple):
    """What a device is to do next.

    Attributes:
        kind: "admit" or "turn".
        trial: its number.
        step: from 0.
        turn: within the step.
        num_turns: turns of the trial in a row; each is committed and reported by itself.
    """

    kind: str
    trial: int
    step: int = -1
    turn: int = 0
    num_turns: int = 1


class Report(NamedTuple):
    """A turn that is committed.

    Attributes:
        trial: its number.
        step: of the trial that it belongs to.
        turn: within the step.
        start_s: when the device took it, in seconds of the machine's monotonic clock.
        end_s: when it was committed.
        loss: of the step, when the turn has completed it; NaN otherwise.
        held_out: the loss on held-out data after the step, where it was evaluated; NaN otherwise.
        read_s: of that, reading state.
        write_s: of that, writing state.
    """

    trial: int
    step: int
    turn: int
    start_s: float
    end_s: float
    loss: float = math.nan
    held_out: float = math.nan
    read_s: float = 0.0
    write_s: float = 0.0


@dataclass
class Entry:
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
