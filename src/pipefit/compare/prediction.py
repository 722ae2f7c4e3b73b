"""What cells should take: profile, links and the executor's costs, measured in the same turns as the cells.

A prediction and what it is held against must be of the same machine, and a shared one is another from minute to minute.
So the layers, the stages by themselves and the executor's costs are measured in every turn, and before and after each
cell the whole model, by the wall clock, on every rank: the prediction of a turn is for those paces. Paces are samples,
so all turns count: those with the best would be those that chance made too good, and all that is measured between them
would look slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from pipefit.calibrate.by_stage import ByStage
from pipefit.calibrate.overhead import Calibration
from pipefit.calibrate.pace import WAITS_S, Pace
from pipefit.calibrate.prediction import predict
from pipefit.compare.pipelines import ScheduledPipeline
from pipefit.compare.settings import CompareConfig
from pipefit.compare.strategies import STRATEGIES, Batch, Subject, Trainer
from pipefit.cost import CostModel, RuntimeCosts, of_plan
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.profiling.agreed import agreed_profile, merged
from pipefit.profiling.links import links_of, per_core
from pipefit.run.optimizers import STATE_PER_WEIGHT
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile
from pipefit.stage.split import named_layers

__all__ = ["Foretelling", "Foretold", "Turn"]

_Cut = tuple[int, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""Micro-batches, the layers of each stage, and its ranks."""
_PASSES = 8
_REPEATS, _LIMIT_S = 2, 0.5
"""Of the layers, in each turn."""


class Turn(NamedTuple):
    """How fast the machine was around one measurement: the pace of each rank before it, and after it."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def pace(self) -> tuple[float, ...]:
        """Of each rank, the mean of both."""
        return tuple((a + b) / 2 for a, b in zip(self.before, self.after, strict=True))


@dataclass(frozen=True)
class Foretold:
    """What a cell should take.

    Attributes:
        step_s: seconds per update in each turn, at its paces.
        bubble: of the simulation; None where nothing was simulated.
        processor_s: of each rank per update, at the median pace.
    """

    step_s: tuple[float, ...]
    bubble: float | None = None
    processor_s: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        """Seconds per update, the median of the turns."""
        return statistics.median(self.step_s)

    def over(self, measured_s: Sequence[float]) -> float:
        """Predicted over measured, the median of the turns."""
        return statistics.median(a / b for a, b in zip(self.step_s, measured_s, strict=True))


@dataclass
class Foretelling:
    """All that predictions are made of; every rank makes one, and calls it alike.

    Attributes:
        profiles: of the model at each number of micro-batches, as first measured. Its pace is 1: at that the whole
            micro-batch takes what the processor time of the layers adds up to.
    """

    session: Session
    optimizer: str
    profiles: dict[int, Profile]
    _measure_layers: Callable[[int], Profile]
    _paces: dict[int, Pace]
    _calibration: Calibration
    _waking: list[list[float]] = field(default_factory=list)
    _stages: dict[_Cut, ByStage] = field(default_factory=dict)
    _later_profiles: list[dict[int, Profile]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, subject: Subject, batch: Batch, counts: list[int], session: Session, config: CompareConfig
    ) -> Foretelling:
        """Profiles the model for some numbers of micro-batches, and the links."""
        layers = named_layers(subject.make())
        sizes = {num: largest_part(batch[0], num) for num in counts}
        how = {"loss": subject.loss, "optimizer": subject.optimizer}

        def profiled(num: int, **limits: Any) -> Profile:
            return agreed_profile(layers, batch, [sizes[num]], session, **how, **limits)

        profiles = {num: profiled(num) for num in counts}
        paces = {num: Pace(layers, batch, sizes[num], session, subject.loss) for num in counts}
        schedules = [name for name in config.strategies or STRATEGIES if STRATEGIES[name].kind == "schedule"]
        calibration = Calibration(session, links_of(session, session.num_ranks), schedules)
        again = partial(profiled, repeats=_REPEATS, limit_s=_LIMIT_S)
        return cls(session, config.optimizer, profiles, again, paces, calibration)

    def follow(self, num_microbatches: int, plan: Plan) -> None:
        """From now on, the stages of this plan are measured in every turn."""
        if num_microbatches in self._paces:
            pace = self._paces[num_microbatches]
            stages = ByStage(pace.step, pace.layers, plan, self.session)
            self._stages.setdefault(_cut_of(num_microbatches, plan), stages)

    def calibrate(self) -> None:
        """A turn of the executor's costs, of what it costs to have waited, of the layers' shares, and of stages."""
        # The smallest micro-batch costs least, and what waiting costs does not grow with it.
        num = max(self.profiles)
        pace = statistics.fmean(self.pace(num) or (1.0,))
        self._calibration.turn(pace, _PASSES)
        self._waking.append([seconds / pace for seconds in self._paces[num].waking_s()])
        self._later_profiles.append({num: self._measure_layers(num) for num in self.profiles})
        for stages in self._stages.values():
            stages.turn()

    def pace(self, num_microbatches: int) -> tuple[float, ...] | None:
        """How much longer the model takes on each rank now than its profile; None: there is none for this number."""
        if num_microbatches not in self.profiles:
            return None
        # Ranks that share cores wait for each other's turns, which the simulation adds.
        crowd = per_core(self._calibration.topology, self.session.num_ranks)
        profile_s = crowd * _layers_s(self.profiles[num_microbatches])
        return tuple(seconds / profile_s for seconds in self._paces[num_microbatches].microbatch_s())

    def of(self, name: str, trainer: Trainer, num: int, steps: int, turns: list[Turn]) -> Foretold | None:
        """What a strategy should take, at the paces of its turns; None where nothing is foretold."""
        if num not in self.profiles:
            return None
        profile = self._profile(num)
        if name in ("accumulate", "one-thread"):
            update_s = _layers_s(profile) * num + profile.optimizer_s
            return Foretold(tuple(update_s * turn.pace[0] for turn in turns))
        if not isinstance(trainer, ScheduledPipeline):
            return None
        program, passes = trainer.timeline(steps).program, trainer.num_passes(steps)
        runtime = self._calibration.costs(trainer.plan.schedule)
        profile, again = self._stages[_cut_of(num, trainer.plan)].applied(profile)
        timelines = []
        spread = self._paces[num].spread
        for number, turn in enumerate(turns):
            cost = self._cost(profile, trainer, runtime, turn.pace)
            waking = self._after_waits(turn.pace)
            timelines.append(predict(program, cost, passes, waking, spread.draws(number), again))
        middle = tuple(statistics.median(paces) for paces in zip(*(turn.pace for turn in turns), strict=True))
        cost = self._cost(profile, trainer, runtime, middle)
        busy = tuple(
            (sum(_busy_s(cost, i, rank) for i in instructions) + cost.pass_s) / program.header.num_steps
            for rank, instructions in enumerate(program.ranks)
        )
        bubble = statistics.median(timeline.bubble_fraction for timeline in timelines)
        fit_s = [runtime.fit_s * statistics.fmean(turn.pace) for turn in turns]
        step_s = tuple((one.makespan_s + more) / steps for one, more in zip(timelines, fit_s, strict=True))
        return Foretold(step_s, bubble, busy)

    def _profile(self, num: int) -> Profile:
        """The median of the turns, each as it would be at pace 1."""
        found = [self.profiles[num], *(turn[num] for turn in self._later_profiles)]
        return merged([one.scaled(_layers_s(found[0]) / _layers_s(one)) for one in found], statistics.median)

    def _cost(
        self, profile: Profile, trainer: ScheduledPipeline, runtime: RuntimeCosts, pace: tuple[float, ...]
    ) -> CostModel:
        """The costs at a pace of each rank."""
        states, runtime = STATE_PER_WEIGHT[self.optimizer], runtime.scaled(statistics.fmean(pace))
        cost = of_plan(profile, trainer.plan, self._calibration.topology, state_per_weight=states, runtime=runtime)
        return replace(cost, speed=tuple(1 / one for one in pace))

    def _after_waits(self, pace: tuple[float, ...]) -> list[tuple[float, float]]:
        """What waits of some lengths cost, the medians of the turns; a longer one no less than a shorter."""
        points, least = [], 0.0
        for wait_s, turns in zip(WAITS_S, zip(*self._waking, strict=True), strict=True):
            least = max(least, statistics.median(turns) * statistics.fmean(pace))
            points.append((wait_s, least))
        return points


def _cut_of(num: int, plan: Plan) -> _Cut:
    return num, tuple(tuple(stage.layers) for stage in plan.partition.stages), plan.placement.ranks


def _busy_s(cost: CostModel, instruction: Instruction, rank: int) -> float:
    """Seconds that an instruction keeps its rank at work."""
    arrival_s = cost.arrival_s if instruction.op is Op.RECV else 0.0
    return cost.duration_s(instruction, rank) + arrival_s


def _layers_s(profile: Profile) -> float:
    """Seconds of a micro-batch, layer by layer."""
    return sum(layer.total_s for layer in profile.layers) + profile.loss_s
