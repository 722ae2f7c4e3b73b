"""Rules that stop trials early. A rule sees losses only, so a study that is resumed stops the same trials."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

LOSS, HELD_OUT = "loss", "held-out"
Losses = Mapping[int, Sequence[float]]


class Verdict(enum.Enum):
    """The verdict on a trial after a step."""

    GO = "go"
    STOP = "stop"
    WAIT = "wait"


class Rule(Protocol):
    """Decides after each step of a trial whether it is stopped. A study's file keeps its name and attributes."""

    name: ClassVar[str]

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """Whether a trial continues.

        Args:
            trial: its number.
            losses: of every trial that has begun, one per step it has done. On held-out data that is the last value
                found; infinite before the first. The rule is then called at steps that are evaluated.
            alive: the trials that may still take turns.
        """

    def why(self, trial: int, losses: Losses) -> str:
        """The reason why a trial was stopped."""


@dataclass(frozen=True)
class Patience:
    """Stops a trial whose loss has not improved for a while.

    Attributes:
        patience: steps without improvement.
        least: the least improvement that counts.
        smooth: steps whose mean is compared, since losses of single batches jump.
        min_steps: no trial stops earlier.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "patience"
    patience: int = 20
    least: float = 0.0
    smooth: int = 5
    min_steps: int = 0
    on: str = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """Stops when the best mean of the last `patience` steps is no better than the best before them."""
        found = losses[trial]
        smooth = self.smooth if self.on == LOSS else 1
        if len(found) < max(self.min_steps, self.patience + smooth):
            return Verdict.GO
        means = [statistics.fmean(found[end - smooth : end]) for end in range(smooth, len(found) + 1)]
        improved = min(means[-self.patience :]) < min(means[: -self.patience]) - self.least
        return Verdict.GO if improved else Verdict.STOP

    def why(self, trial: int, losses: Losses) -> str:
        """The reason why a trial was stopped."""
        return f"no better for {self.patience} steps (step {len(losses[trial])})"


@dataclass(frozen=True)
class Median:
    """Stops a trial whose best loss so far is worse than the median of the others' averages up to the same step.

    The median depends on how far the others have come, hence on the machine; `halving` does not.
    Source: Google Vizier (KDD 2017) §3.2.2.

    Attributes:
        min_steps: no trial is stopped earlier.
        every: steps between verdicts.
        min_trials: others that must have come as far.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "median"
    min_steps: int = 10
    every: int = 5
    min_trials: int = 2
    on: str = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """Stops at each `every`-th step, when enough others have come as far and half of them did better."""
        found = losses[trial]
        at = len(found)
        if at < self.min_steps or at % self.every:
            return Verdict.GO
        others = self._others(trial, losses)
        if len(others) < self.min_trials:
            return Verdict.GO
        return Verdict.STOP if min(found) > statistics.median(others) else Verdict.GO

    def _others(self, trial: int, losses: Losses) -> list[float]:
        at = len(losses[trial])
        averaged = ([v for v in o[:at] if v < math.inf] for n, o in losses.items() if n != trial and len(o) >= at)
        return [statistics.fmean(values) for values in averaged if values]

    def why(self, trial: int, losses: Losses) -> str:
        """The reason why a trial was stopped."""
        median = statistics.median(self._others(trial, losses) or [float("nan")])
        return f"best {min(losses[trial]):.4g} after {len(losses[trial])} steps, median of the others {median:.4g}"


@dataclass(frozen=True)
class Halving:
    """Successive halving: at each rung trials wait for each other, and only the best share continues.

    Which trials survive does not depend on the machine: waiting costs nothing where others can take the turns.
    Source: Jamieson and Talwalkar (AISTATS 2016).

    Attributes:
        first: steps to the first rung; the next is `factor` times as far.
        factor: one of so many continues.
        smooth: steps whose mean loss is compared.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "halving"
    first: int = 10
    factor: int = 2
    smooth: int = 3
    on: str = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """At a rung: waits for trials that may still reach it, then continues the best."""
        at = len(losses[trial])
        if not self._is_rung(at):
            return Verdict.GO
        if any(len(losses.get(other, ())) < at for other in alive):
            return Verdict.WAIT
        ranked = self._ranked(at, losses)
        keep = -(-len(ranked) // self.factor)
        return Verdict.GO if trial in ranked[:keep] else Verdict.STOP

    def _is_rung(self, at: int) -> bool:
        rung = self.first
        while rung < at:
            rung *= self.factor
        return rung == at

    def _ranked(self, at: int, losses: Losses) -> list[int]:
        smooth = self.smooth if self.on == LOSS else 1
        scores = [(statistics.fmean(o[max(at - smooth, 0) : at]), n) for n, o in losses.items() if len(o) >= at]
        return [number for _, number in sorted(scores)]

    def why(self, trial: int, losses: Losses) -> str:
        """The reason why a trial was stopped."""
        at = len(losses[trial])
        ranked = self._ranked(at, losses)
        return f"number {ranked.index(trial) + 1} of {len(ranked)} after {at} steps; one of {self.factor} continues"


RULES: Mapping[str, type[Patience] | type[Median] | type[Halving]] = {
    rule.name: rule for rule in (Patience, Median, Halving)
}
"""By name."""
