"""The result of a comparison: one row per strategy and number of micro-batches, and its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pipefit.compare.settings import STRATEGIES, WHOLE
from pipefit.draw.chart import can_plot, chart
from pipefit.schedules import find
from pipefit.spec.files import JsonObject, write_atomically, write_json


@dataclass(frozen=True)
class Row:
    """One strategy at one number of micro-batches; None where a figure is not defined.

    Attributes:
        strategy: its name.
        num_microbatches: per update.
        step_s: median seconds per update.
        samples_per_s: of the median.
        speedup: over one process with one thread that takes the whole batch at once.
        speedup_accumulated: over one process that accumulates the same number of micro-batches.
        bubble: measured; the share of the ranks' time without forward or backward.
        bubble_predicted: of the simulation.
        predicted_step_s: seconds per update of the simulation.
        predicted_over_measured: of the median seconds per update.
        utilisation: of each rank, busy time over wall time.
        peak_bytes: of each rank: weights and states, and the peak growth during an update.
        final_loss: mean of the last updates of the samples that every row has seen.
        spread: half the distance between the quartiles of the seconds per update, relative to the median.
    """

    strategy: str
    num_microbatches: int
    step_s: float
    samples_per_s: float
    speedup: float | None = None
    speedup_accumulated: float | None = None
    bubble: float | None = None
    bubble_predicted: float | None = None
    predicted_step_s: float | None = None
    predicted_over_measured: float | None = None
    utilisation: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    final_loss: float | None = None
    spread: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """A cell that could not be measured, and the reason."""

    strategy: str
    num_microbatches: int
    reason: str


class Choice(NamedTuple):
    """The synchronous plan that is fastest by prediction, and the one that is fastest by measurement.

    Attributes:
        chosen: by prediction.
        best: by measurement.
    """

    chosen: Row
    best: Row

    @property
    def over_best(self) -> float:
        """Measured seconds per update of the chosen plan over those of the best; 1: the choice is right."""
        return self.chosen.step_s / self.best.step_s


@dataclass
class Comparison:
    """The measurements, the same on every rank.

    Attributes:
        model: described in one line.
        data: name of the training data.
        num_ranks: of the run.
        batch: samples per update.
        samples: after which the final losses are taken.
        repeats: of every cell; figures are their medians.
        layer_counts: of the stages, one per rank.
        rows: measured.
        refused: not measured.
    """

    model: str
    data: str
    num_ranks: int
    batch: int
    samples: int
    layer_counts: tuple[int, ...]
    repeats: int = 1
    rows: list[Row] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)

    def with_speedups(self) -> Comparison:
        """Fills in the speed-ups, where their baselines were measured."""
        single = None
        summed: dict[int, float] = {}
        for row in self.rows:
            if row.strategy == "one-thread":
                single = row.step_s
                summed.setdefault(1, single)
            elif row.strategy == "accumulate":
                summed[row.num_microbatches] = row.step_s
        rows = []
        for row in self.rows:
            if single is not None:
                row = replace(row, speedup=single / row.step_s)
            if row.num_microbatches in summed and row.strategy not in WHOLE:
                row = replace(row, speedup_accumulated=summed[row.num_microbatches] / row.step_s)
            rows.append(row)
        return replace(self, rows=rows)

    def as_dict(self) -> JsonObject:
        """The comparison as JSON data."""
        choice = self.choice
        data = {"format": "pipefit.comparison/1", **asdict(self), "largest_error": self.largest_error}
        if choice is not None:
            named = {which: [row.strategy, row.num_microbatches] for which, row in choice._asdict().items()}
            data["choice"] = named | {"over_best": choice.over_best}
        return data

    @property
    def largest_error(self) -> float | None:
        """The largest |predicted / measured - 1| of a synchronous schedule; None: nothing was predicted."""
        errors = [abs(row.predicted_over_measured - 1) for row in self._candidates() if row.predicted_over_measured]
        return max(errors, default=None)

    @property
    def choice(self) -> Choice | None:
        """The plan chosen by prediction and the best one; None: nothing was predicted."""
        rows = self._candidates()
        if not rows:
            return None
        chosen = min(rows, key=lambda row: row.predicted_step_s or 0.0)
        return Choice(chosen, min(rows, key=lambda row: row.step_s))

    def _candidates(self) -> list[Row]:
        """The rows of synchronous schedules, which all give the same training: the choices of a planner."""
        predicted = [row for row in self.rows if row.predicted_step_s is not None]
        scheduled = [row for row in predicted if STRATEGIES.get(row.strategy) == "schedule"]
        return [row for row in scheduled if find(row.strategy).is_synchronous]

    def chart(self) -> str:
        """Samples per second over micro-batches, one line per strategy, as SVG."""
        counts = sorted({row.num_microbatches for row in self.rows})
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            # The whole batch at once is a baseline, drawn as a level.
            places = [row.num_microbatches]
            if row.strategy in WHOLE:
                places = counts
            line = lines.setdefault(row.strategy, [])
            line += [(float(place), row.samples_per_s) for place in places]
        return chart(
            lines,
            title=f"{self.model.partition('(')[0]} on {self.num_ranks} ranks",
            x_label=f"micro-batches per update of {self.batch} samples",
            y_label="samples per second",
            log_x=True,
            width=980,
            height=520,
        )

    def save(self, folder: str | Path) -> dict[str, str]:
        """Writes the figures as JSON and, where matplotlib is installed, the chart as SVG.

        Returns:
            The paths, by kind.
        """
        place = Path(folder)
        paths = {"json": write_json(place / "compare.json", self.as_dict())}
        if self.rows and can_plot():
            paths["chart"] = write_atomically(place / "compare.svg", self.chart())
        return {kind: str(path) for kind, path in paths.items()}
