"""What cells should take: profile, links and the executor's costs, measured in the same turns as the cells.

A prediction and what it is held against must be of the same machine, and a shared one is another from minute to minute.
So the executor's costs are measured in every turn, and before and after each cell the model itself, whole, by the wall
clock: the prediction of a turn is for that pace.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from pipefit.compare.config import CompareConfig
from pipefit.compare.pipelines import ScheduledPipeline
from pipefit.compare.strategies import STRATEGIES, Batch, Subject, Trainer
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.stage.split import named_layers
from pipefit.train.batch import largest_part
from pipefit.train.calibrate import Calibration
from pipefit.train.optimizers import STATE_PER_WEIGHT
from pipefit.train.pace import WAITS_S, Pace
from pipefit.train.predicted import cost_of, links_of, per_core, predict
from pipefit.train.profiled import agreed_profile

__all__ = ["Foretelling", "Foretold"]

_PASSES = 8


@dataclass(frozen=True)
class Foretold:
    """What a cell should take.

    Attributes:
        step_s: seconds per update in each turn, at the pace of the turn.
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

    def over(self, measured_s: list[float]) -> float:
        """Predicted over measured, the median of the turns."""
        return statistics.median(a / b for a, b in zip(self.step_s, measured_s, strict=True))


@dataclass
class Foretelling:
    """All that predictions are made of; every rank makes one, and calls it alike.

    Attributes:
        profiles: of the model at each number of micro-batches, at one pace: that at which the whole micro-batch takes
            what its layers' processor time adds up to.
    """

    session: Session
    optimizer: str
    profiles: dict[int, Profile]
    _paces: dict[int, Pace]
    _calibration: Calibration
    _calibrated_at: list[float] = field(default_factory=list)
    _waking: list[list[float]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, subject: Subject, batch: Batch, counts: list[int], session: Session, config: CompareConfig
    ) -> Foretelling:
        """Profiles the model for some numbers of micro-batches, and the links."""
        layers = named_layers(subject.make())
        sizes = {num: largest_part(batch[0], num) for num in counts}
        how = {"loss": subject.loss, "optimizer": subject.optimizer}
        profiles = {num: agreed_profile(layers, batch, [sizes[num]], session, **how) for num in counts}
        paces = {num: Pace(layers, batch, sizes[num], session, subject.loss) for num in counts}
        schedules = [name for name in config.strategies or STRATEGIES if STRATEGIES[name].kind == "schedule"]
        calibration = Calibration(session, links_of(session, session.num_ranks), schedules)
        return cls(session, config.optimizer, profiles, paces, calibration)

    def calibrate(self) -> None:
        """A turn of the executor's costs, and of what it costs to have waited."""
        # The smallest micro-batch costs least, and what waiting costs does not grow with it.
        num = max(self.profiles)
        pace = self.pace(num) or 1.0
        self._calibrated_at.append(pace)
        self._calibration.turn(pace, _PASSES)
        self._waking.append([seconds / pace for seconds in self._paces[num].waking_s()])

    def pace(self, num_microbatches: int) -> float | None:
        """How much longer the model takes at this moment than its profile; None: there is none for this number."""
        if num_microbatches not in self.profiles:
            return None
        # Ranks that share cores wait for each other's turns, which the simulation adds.
        crowd = per_core(self._calibration.topology, self.session.num_ranks)
        return self._paces[num_microbatches].microbatch_s() / crowd / _layers_s(self.profiles[num_microbatches])

    def of(self, name: str, trainer: Trainer, num: int, steps: int, paces: list[float]) -> Foretold | None:
        """What a strategy should take, at the paces of its turns; None where nothing is foretold."""
        profile = self.profiles.get(num)
        if profile is None:
            return None
        if name in ("accumulate", "one-thread"):
            update_s = _layers_s(profile) * num + profile.optimizer_s
            return Foretold(tuple(update_s * pace for pace in paces))
        if not isinstance(trainer, ScheduledPipeline):
            return None
        # Profiles were taken at different moments: all that is put together is first brought to the median pace.
        middle, calibrated = statistics.median(paces), statistics.median(self._calibrated_at)
        costs = self._calibration.costs(trainer.plan.schedule).scaled(calibrated)
        waking = [(wait_s, seconds * calibrated) for wait_s, seconds in self._after_waits()]
        states = STATE_PER_WEIGHT[self.optimizer]
        cost = cost_of(profile.scaled(middle), trainer.plan, self._calibration.topology, states, costs)
        program = trainer.timeline(steps).program
        timeline = predict(program, cost, trainer.num_passes(steps), waking)
        busy = tuple(
            (sum(cost.duration_s(i, rank) for i in instructions) + cost.pass_s) / program.header.num_steps
            for rank, instructions in enumerate(program.ranks)
        )
        step_s = tuple(timeline.makespan_s / steps * pace / middle for pace in paces)
        return Foretold(step_s, timeline.bubble_fraction, busy)

    def _after_waits(self) -> list[tuple[float, float]]:
        """What waits of some lengths cost, the medians of the turns; a longer one no less than a shorter."""
        points, least = [], 0.0
        for wait_s, turns in zip(WAITS_S, zip(*self._waking, strict=True), strict=True):
            least = max(least, statistics.median(turns))
            points.append((wait_s, least))
        return points


def _layers_s(profile: Profile) -> float:
    """Seconds of a micro-batch, layer by layer."""
    return sum(layer.total_s for layer in profile.layers) + profile.loss_s
