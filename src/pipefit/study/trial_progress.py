"""The progress of each trial of a study; at the end, its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipefit.spec.files import JsonObject
from pipefit.study.simulation import TrialCost
from pipefit.study.trial import Evaluations, Progress, Trial, Values, plain

_ENDED = ("finished", "stopped", "failed")
_KEPT = ("status", "reason", "losses", "busy_s", "moved_s", "moves", "shards", "parameters", "device_bytes")
_ROW = ("name", "values", "steps", "score", "last_loss", "held_out", *_KEPT)


@dataclass
class TrialProgress:
    """The progress of a trial of the study; at the end, its result.

    Attributes:
        number: in the order of the study.
        trial: its definition.
        name: also of its files.
        status: "waiting" to be admitted, "ready", "running", "held" at a rung, or its end: "finished", "stopped" by the
            rule, "failed".
        reason: of its end, where it did not finish.
        losses: of each step done.
        held_out: (step, loss) of every evaluation on held-out data, steps from 1.
        turn: the next one of the current step.
        first_step: of this run of the study.
        num_turns, shards, parameters, tier_bytes, device_bytes: see `Figures`; 0: it is not built yet.
        device: of its last turn; −1: none.
        last_turn: time of its last turn, counted in turns of the study.
        busy_s: seconds of devices that it took.
        moves: number of changes of its device.
        moved_s: of `busy_s`, reading and writing its state.
        deaths: of workers that had it.
        turn_s: mean seconds and number of each turn of a step.
    """

    number: int
    trial: Trial
    name: str
    status: str = "waiting"
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    held_out: Evaluations = field(default_factory=list)
    turn: int = 0
    first_step: int = 0
    num_turns: int = 0
    shards: int = 0
    parameters: int = 0
    tier_bytes: int = 0
    device_bytes: float = 0.0
    device: int = -1
    last_turn: int = -1
    busy_s: float = 0.0
    moves: int = 0
    moved_s: float = 0.0
    deaths: int = 0
    turn_s: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def values(self) -> Values:
        """The values that distinguish it from other trials."""
        return self.trial.values

    @property
    def has_ended(self) -> bool:
        """Returns whether it takes no more turns."""
        return self.status in _ENDED

    @property
    def is_built(self) -> bool:
        """Returns whether it was admitted in this run of the study."""
        return self.num_turns > 0

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def last_loss(self) -> float | None:
        """The loss of its last step."""
        if self.losses:
            return self.losses[-1]
        return None

    @property
    def score(self) -> float | None:
        """The last loss on held-out data, else the mean of the last tenth of the steps' losses; None before."""
        last = self.losses[-max(self.steps // 10, 1) :]
        if self.trial.evaluate:
            last = [loss for _, loss in self.held_out[-1:] if math.isfinite(loss)]
        if last:
            return sum(last) / len(last)
        return None

    @property
    def curve(self) -> list[float]:
        """For each step done, the last loss on held-out data; infinite before the first."""
        found = dict(self.held_out)
        last = math.inf
        curve = []
        for step in range(1, self.steps + 1):
            last = found.get(step, last)
            curve.append(last)
        return curve

    def as_dict(self) -> JsonObject:
        """Its result as JSON data."""
        return {key: plain(getattr(self, key)) for key in _ROW}

    def restore(self, row: Values) -> None:
        """Takes over the result of an earlier run, from `as_dict`."""
        vars(self).update({key: row[key] for key in _KEPT})
        self.held_out = [(step, math.inf if loss is None else loss) for step, loss in row["held_out"]]

    def stands_at(self, found: Progress) -> None:
        """Sets it to the position of its last commit."""
        self.turn, self.losses, self.held_out = found

    def measured(self, turn: int, seconds: float) -> None:
        """Adds a turn to a mean over the last 16 or so; the first one counts only until there is another."""
        mean, count = self.turn_s.get(turn, (seconds, 0))
        count = min(count + 1, 16)
        if count > 2:
            self.turn_s[turn] = (mean + (seconds - mean) / count, count)
        else:
            self.turn_s[turn] = (seconds, count)

    @property
    def cost(self) -> TrialCost | None:
        """The time of its turns; None until each was measured."""
        if not self.is_built or len(self.turn_s) < self.num_turns:
            return None
        return TrialCost(tuple(self.turn_s[k][0] for k in range(self.num_turns)), self.trial.steps)

    def remaining_of(self, cost: TrialCost) -> float:
        """Remaining time in isolation, in seconds, for known times of its turns."""
        further = self.trial.steps - self.steps - 1
        return sum(cost.turns_s[self.turn :]) + further * sum(cost.turns_s)
