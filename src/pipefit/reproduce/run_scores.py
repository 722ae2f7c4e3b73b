"""Published training runs against their predictions: how far off, in which order, which choice, and what fits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from pipefit.draw.chart import chart
from pipefit.planner.machines import load_topology
from pipefit.planner.measured_runs import Expected, MeasuredRun, fit_machine, fits, predict, read_runs
from pipefit.run.observer import Say
from pipefit.spec.files import JsonObject
from pipefit.units import columns

RUNS = Path(__file__).parent / "published-runs.csv"
FITTED = 5
"""The machine of a collection is fitted to every fifth of its runs; the others judge."""

_OF_MEMORY = "dgx-a100-8"
"""A machine with the devices on which runs ran out of memory."""

_FEWEST = 10
"""The least number of runs of a collection that a machine is fitted to, and of a group whose order counts."""


@dataclass(frozen=True)
class Judged:
    """A published run next to its prediction.

    Attributes:
        run: what was published.
        group: of runs that answer one question: same collection, devices, sequence and batch.
        expected: by prediction.
        judges: whether nothing was fitted to it.
    """

    run: MeasuredRun
    group: str
    expected: Expected
    judges: bool = True

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        assert self.run.seconds is not None
        return self.expected.seconds / self.run.seconds - 1


@dataclass(frozen=True)
class Score:
    """How well runs are predicted.

    Attributes:
        collection: of the runs.
        constants: where those of the machine come from.
        runs: number of runs that judge.
        bias: the median error.
        median: of the errors' sizes.
        ninth: their 90th percentile.
        tau: Kendall's, the mean over groups of ten or more; None: there is none.
        regret: seconds of the runs that it would choose, over the best of their groups, less one; the mean.
        memory: share of runs, those that ran out of memory too, of which it knows whether they fit; None: none did.
    """

    collection: str
    constants: str
    runs: int
    bias: float
    median: float
    ninth: float
    tau: float | None
    regret: float | None
    memory: float | None


@dataclass(frozen=True)
class Published:
    """The whole comparison.

    Attributes:
        scores: a line for each collection and each set of constants.
        judged: by (collection, constants).
    """

    scores: tuple[Score, ...]
    judged: Mapping[tuple[str, str], Sequence[Judged]]

    @property
    def text(self) -> str:
        """The table of scores."""
        head = ["collection", "constants", "runs", "bias", "median", "90 %", "tau", "regret", "memory"]
        rows = [head]
        for each in self.scores:
            shares = (each.bias, each.median, each.ninth, each.regret, each.memory)
            bias, middle, ninth, regret, memory = ("-" if share is None else f"{share:.1%}" for share in shares)
            tau = "-" if each.tau is None else f"{each.tau:.2f}"
            rows.append([each.collection, each.constants, str(each.runs), bias, middle, ninth, tau, regret, memory])
        return "\n".join(columns(rows))

    def as_dict(self) -> JsonObject:
        """For JSON."""
        runs = [
            {"collection": collection, "constants": constants, "error": each.error, **asdict(each.run)}
            for (collection, constants), judged in self.judged.items()
            for each in judged
            if each.run.seconds is not None
        ]
        return {"scores": [asdict(score) for score in self.scores], "runs": runs}

    def svg(self) -> str:
        """Predicted against measured seconds of all runs."""
        series = {
            f"{collection}, {constants}": [
                (each.run.seconds, each.expected.seconds) for each in judged if each.run.seconds is not None
            ]
            for (collection, constants), judged in self.judged.items()
        }
        return chart(
            series,
            kind="points",
            title="Seconds of a step: measured (across) and predicted (up)",
            x_label="measured s",
            y_label="predicted s",
        )


def published_runs(on_collection: Say | None = None) -> Published:
    """Predicts all published runs, first with constants of data sheets, then with a machine fitted to a part of them.

    Args:
        on_collection: called with what is done next.
    """
    collections = defaultdict(list)
    for run, line in read_runs(RUNS):
        collections[line["collection"]].append((run, line))
    scores = []
    judged = {}
    for name, rows in collections.items():
        if on_collection is not None:
            on_collection(f"{name}: {len(rows)} runs")
        made = [Judged(run, _group(run), predict(run, load_topology(line["machine"]))) for run, line in rows]
        judged[name, "data sheet"] = made
        scores.append(_score(name, "data sheet", made))
        timed = [row for row in rows if row[0].seconds is not None]
        part = timed[::FITTED]
        if len(timed) < _FEWEST:
            continue
        if on_collection is not None:
            on_collection(f"{name}: a machine fitted to {len(part)} runs")
        fitted = fit_machine([run for run, _ in part], load_topology(part[0][1]["machine"]))
        # A run that was measured twice does not judge a fit to one of its measurements.
        chosen = {run.question() for run, _ in part}
        made = [
            Judged(run, _group(run), predict(run, fitted.topology), run.question() not in chosen) for run, _ in rows
        ]
        judged[name, "fitted"] = made
        scores.append(_score(name, "fitted", made))
    return Published(tuple(scores), judged)


def _group(run: MeasuredRun) -> str:
    """The question that runs answer of which a user would choose one: devices, batch and model."""
    sizes = re.findall(r"(?:layers|hidden|sequence|heads)=\d+", run.model)
    return f"{run.devices} devices, batch {run.batch}, {','.join(sizes)}"


def _score(collection: str, constants: str, judged: Sequence[Judged]) -> Score:
    judges = [each for each in judged if each.judges]
    timed = [each for each in judges if each.run.seconds is not None]
    sizes = sorted(abs(each.error) for each in timed)
    groups = defaultdict(list)
    for each in timed:
        groups[each.group].append(each)
    large = [group for group in groups.values() if len(group) >= _FEWEST]
    memory = None
    if len(timed) < len(judges):
        known = [_knows_memory(each) for each in judges]
        memory = sum(known) / len(known)
    return Score(
        collection,
        constants,
        len(timed),
        median(each.error for each in timed),
        median(sizes),
        sizes[int(0.9 * len(sizes))],
        _mean([kendall([(each.expected.seconds, each.run.seconds or 0.0) for each in group]) for group in large]),
        _mean([_regret(group) for group in large]),
        memory,
    )


def _knows_memory(each: Judged) -> bool:
    device = load_topology(_OF_MEMORY).device
    return fits(each.expected, device) == (each.run.seconds is not None)


def _regret(group: Sequence[Judged]) -> float:
    chosen = min(group, key=lambda each: each.expected.seconds)
    best_s = min(each.run.seconds or 0.0 for each in group)
    return (chosen.run.seconds or 0.0) / best_s - 1


def _mean(values: Sequence[float]) -> float | None:
    if values:
        return sum(values) / len(values)
    return None


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: pairs in the same order less those in opposite order, over all pairs (1938).

    >>> kendall([(1, 10), (2, 20), (3, 30)]), kendall([(1, 30), (2, 20), (3, 10)])
    (1.0, -1.0)
    """
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)
