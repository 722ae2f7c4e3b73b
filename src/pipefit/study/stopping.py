"""Rules that stop trials early. A rule sees only losses, so a study that is resumed stops the same trials.

After each step of a trial `judge` gives the verdict on it: None, `WAIT` or the reason why it is stopped. Its arguments:

    trial     its number
    losses    of every trial that has begun, one for each step done. On held-out data each is the last evaluation's,
              infinite before the first; the rule is then called at steps that are evaluated
    alive     the trials that may still take turns
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipefit.spec.arguments import Amount, NotNegative, Number, Several
from pipefit.spec.options import setting

Losses = Mapping[int, Sequence[float]]
On = Literal["loss", "held-out"]
LOSS: On = "loss"
HELD_OUT: On = "held-out"


WAIT = "wait"
"""The verdict for a trial that waits for others. The others are None (it continues) and the reason of a stop."""


@dataclass(frozen=True)
class Patience:
    """Stops a trial whose loss has not improved for a while.

    Attributes:
        patience: steps without improvement.
        least: the smallest improvement that counts.
        smooth: steps whose mean is compared, because losses of single batches vary.
        min_steps: no trial stops earlier.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "patience"
    patience: Number = setting(20)
    least: NotNegative = setting(0.0)
    smooth: Number = setting(5)
    min_steps: Amount = setting(0)
    on: On = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> str | None:
        """Stops when the best mean of the last `patience` steps is no better than the best before them."""
        found = losses[trial]
        smooth = _smoothed(self)
        if len(found) < max(self.min_steps, self.patience + smooth):
            return None
        means = [statistics.fmean(found[end - smooth : end]) for end in range(smooth, len(found) + 1)]
        before = min(means[: -self.patience])
        if min(means[-self.patience :]) < before - self.least:
            return None
        return f"no better for {self.patience} steps (step {len(found)})"


@dataclass(frozen=True)
class Median:
    """Stops a trial whose best loss so far is worse than the median of the others' averages up to the same step.

    The median depends on the progress of the others, hence on the machine; `halving` does not.
    Source: Google Vizier (KDD 2017) §3.2.2.

    Attributes:
        min_steps: no trial is stopped earlier.
        every: steps between verdicts.
        min_trials: number of others that must have reached the same step.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "median"
    min_steps: Amount = setting(10)
    every: Number = setting(5)
    min_trials: Number = setting(2)
    on: On = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> str | None:
        """Stops at each `every`-th step, when enough others have reached it and half of them were better."""
        best = min(losses[trial])
        at = len(losses[trial])
        if at < self.min_steps or at % self.every:
            return None
        others = []
        for other, curve in losses.items():
            values = [loss for loss in curve[:at] if loss < math.inf]
            if other != trial and len(curve) >= at and values:
                others.append(statistics.fmean(values))
        if len(others) < self.min_trials:
            return None
        median = statistics.median(others)
        if best <= median:
            return None
        return f"best {best:.4g} after {at} steps, median of the others {median:.4g}"


@dataclass(frozen=True)
class Halving:
    """Successive halving: at each rung trials wait for each other, and only the best share continues.

    The surviving trials do not depend on the machine; waiting costs nothing where others can take the turns.
    Source: Jamieson and Talwalkar (AISTATS 2016).

    Attributes:
        first: steps to the first rung; each further one is at `factor` times as many.
        factor: one of so many continues.
        smooth: steps whose mean loss is compared.
        on: "loss" of the training, or "held-out".
    """

    name: ClassVar[str] = "halving"
    first: Number = setting(10)
    factor: Several = setting(2)
    smooth: Number = setting(3)
    on: On = LOSS

    def judge(self, trial: int, losses: Losses, alive: Collection[int]) -> str | None:
        """At a rung: waits for trials that may still reach it, then continues the best."""
        at = len(losses[trial])
        if not self._is_rung(at):
            return None
        if any(len(losses.get(other, ())) < at for other in alive):
            return WAIT
        first = max(at - _smoothed(self), 0)
        scores = [(statistics.fmean(curve[first:at]), n) for n, curve in losses.items() if len(curve) >= at]
        count = len(scores)
        place = [number for _, number in sorted(scores)].index(trial) + 1
        if place <= -(-count // self.factor):
            return None
        return f"number {place} of {count} after {at} steps; one of {self.factor} continues"

    def _is_rung(self, at: int) -> bool:
        rung = self.first
        while rung < at:
            rung *= self.factor
        return rung == at


def _smoothed(rule: Patience | Halving) -> int:
    """The steps whose mean is compared; a loss on held-out data is compared as it is."""
    if rule.on == LOSS:
        return rule.smooth
    return 1


Rule = Patience | Median | Halving
"""Any of them. A study's file keeps its name and attributes."""

RULES: Mapping[str, type[Rule]] = {rule.name: rule for rule in (Patience, Median, Halving)}
"""By name."""
