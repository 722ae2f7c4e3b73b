"""Rules that stop trials early. A rule looks at losses alone, so a study that goes on later judges as it did before."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

__all__ = ["HELD_OUT", "LOSS", "RULES", "Halving", "Median", "Patience", "Rule", "Verdict"]

LOSS, HELD_OUT = "loss", "held-out"
Losses = Mapping[int, Sequence[float]]


class Verdict(enum.Enum):
    """What becomes of a trial after a step."""

    GO = "go"
    STOP = "stop"
    WAIT = "wait"


class Rule(Protocol):
    """Judges a trial after each of its steps."""

    name: ClassVar[str]

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """Whether a trial goes on.

        Args:
            trial: its number.
            losses: of every trial that has begun, one per step it has done. On held-out data that is the last value
                found; infinite before the first. Judged is then at steps that are evaluated.
            alive: the trials that may still take turns.
        """

    def why(self, trial: int, losses: Losses) -> str:
        """In words, for a trial that was stopped."""

    def told(self) -> dict[str, Any]:
        """The rule as JSON data."""


@dataclass(frozen=True)
class Patience:
    """Stops a trial whose loss has not improved for a while.

    Attributes:
        patience: steps without improvement.
        least: what counts as improvement.
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
        own = losses[trial]
        smooth = self.smooth if self.on == LOSS else 1
        if len(own) < max(self.min_steps, self.patience + smooth):
            return Verdict.GO
        means = [statistics.fmean(own[end - smooth : end]) for end in range(smooth, len(own) + 1)]
        improved = min(means[-self.patience :]) < min(means[: -self.patience]) - self.least
        return Verdict.GO if improved else Verdict.STOP

    def why(self, trial: int, losses: Losses) -> str:
        """In words."""
        return f"no better for {self.patience} steps (step {len(losses[trial])})"

    def told(self) -> dict[str, Any]:
        """The rule as JSON data."""
        return {"rule": self.name, **asdict(self)}


@dataclass(frozen=True)
class Median:
    """Stops a trial whose best loss so far is worse than the median of the others' averages up to the same step.

    What it compares with depends on how far the others have come, hence on the machine; `halving` does not.
    Source: Google Vizier (KDD 2017) §3.2.2.

    Attributes:
        min_steps: no trial is judged earlier.
        every: steps between judgements.
        min_trials: others that must have come as far.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "median"
    min_steps: int = 10
    every: int = 5
    min_trials: int = 2
    on: str = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """Stops at a step that is judged, when enough others have come as far and half of them did better."""
        own = losses[trial]
        at = len(own)
        if at < self.min_steps or at % self.every:
            return Verdict.GO
        others = self._others(trial, losses)
        if len(others) < self.min_trials:
            return Verdict.GO
        return Verdict.STOP if min(own) > statistics.median(others) else Verdict.GO

    def _others(self, trial: int, losses: Losses) -> list[float]:
        at = len(losses[trial])
        found = ([v for v in o[:at] if v < math.inf] for n, o in losses.items() if n != trial and len(o) >= at)
        return [statistics.fmean(values) for values in found if values]

    def why(self, trial: int, losses: Losses) -> str:
        """In words."""
        median = statistics.median(self._others(trial, losses) or [float("nan")])
        return f"best {min(losses[trial]):.4g} after {len(losses[trial])} steps, median of the others {median:.4g}"

    def told(self) -> dict[str, Any]:
        """The rule as JSON data."""
        return {"rule": self.name, **asdict(self)}


@dataclass(frozen=True)
class Halving:
    """Successive halving: at each rung trials wait for each other, and only the best share goes on.

    Which trials survive does not depend on the machine: waiting costs nothing where others can take the turns.
    Source: Jamieson and Talwalkar (AISTATS 2016).

    Attributes:
        first: steps to the first rung; the next is `factor` times as far.
        factor: one of so many goes on.
        smooth: steps whose mean loss is compared.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "halving"
    first: int = 10
    factor: int = 2
    smooth: int = 3
    on: str = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> Verdict:
        """At a rung: waits for trials that may still reach it, then goes on with the best."""
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
        """In words."""
        at = len(losses[trial])
        ranked = self._ranked(at, losses)
        return f"number {ranked.index(trial) + 1} of {len(ranked)} after {at} steps; one of {self.factor} goes on"

    def told(self) -> dict[str, Any]:
        """The rule as JSON data."""
        return {"rule": self.name, **asdict(self)}


RULES: Mapping[str, type[Patience] | type[Median] | type[Halving]] = {
    rule.name: rule for rule in (Patience, Median, Halving)
}
"""By name."""
