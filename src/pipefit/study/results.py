"""The result of a study: numbers, a table for people, files.

Files that a resumed study reads back carry a checksum.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from pipefit.draw.chart import can_plot
from pipefit.spec.files import JsonObject, write_atomically
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.study.board import Board
from pipefit.study.picture import picture, trace
from pipefit.study.simulation import POLICIES
from pipefit.study.trial import StudyError, Trial, plain
from pipefit.study.trial_progress import TrialProgress
from pipefit.units import columns, counted, format_bytes, format_seconds

_RESULT = "pipefit.study-result/1"
_ENDED = "pipefit.study-trial/2"
_FIGURES = ("policy", "num_devices", "makespan_s", "bound_s", "gap", "predicted_s", "policies", "resumed")


@dataclass
class StudyResult:
    """A study's outcome.

    Attributes:
        name: of the study.
        policy: that chose the turns.
        num_devices: workers.
        trials: in the order of the study.
        best: name of the trial with the lowest score; None: no trial succeeded.
        makespan_s: measured, from the first turn to the last.
        bound_s: lower bound over all policies for the same turns: max(longest trial, total / devices).
        gap: makespan over bound, minus one.
        predicted_s: the makespan, simulated after the first turns of each trial; None: a trial began too late for that.
        policies: for every policy "makespan_s" and "gap", simulated with the measured turns; likewise for one trial
            after the other over all devices, with GPipe's schedule ("gpipe") and naively ("naive").
        interrupted: whether it was stopped before its end, and can be resumed.
        resumed: whether this run resumed an earlier one; times are then of this run only.
        paths: of its files.
    """

    name: str
    policy: str
    num_devices: int
    trials: list[TrialProgress]
    best: str | None
    makespan_s: float
    bound_s: float
    gap: float
    predicted_s: float | None
    policies: dict[str, dict[str, float]]
    interrupted: bool
    resumed: bool
    paths: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TrialProgress:
        return {row.name: row for row in self.trials}[name]

    def __str__(self) -> str:
        return table_of(self)

    @property
    def num_failed(self) -> int:
        """Trials that failed."""
        return sum(row.status == "failed" for row in self.trials)

    def as_dict(self) -> JsonObject:
        """As JSON data."""
        return {"format": _RESULT, **vars(self), "trials": [row.as_dict() for row in self.trials]}


def result_of(board: Board, name: str, interrupted: bool, resumed: bool, folder: Path) -> StudyResult:
    """The result so far.

    Args:
        board: the study.
        name: of the study.
        interrupted: whether it was stopped before its end.
        resumed: whether it was resumed. Where nothing was left to do, times are those of the earlier run.
        folder: of the study.
    """
    best = board.best
    before = None
    if resumed and not board.turns:
        before = _kept(folder / "results.json", _RESULT, "figures of earlier runs are then lost")
    if before is not None:
        figures = {key: before[key] for key in _FIGURES}
    else:
        measured = board.measured()
        policies = {}
        bound = 0.0
        if board.turns:
            for policy in POLICIES:
                found = board.in_hindsight(policy)
                policies[policy] = {"makespan_s": found.makespan_s, "gap": found.gap}
                bound = max(bound, found.bound_s)
        if bound:
            for way, seconds in board.one_by_one().items():
                policies[way] = {"makespan_s": seconds, "gap": seconds / bound - 1}
        figures = {
            "policy": board.policy,
            "num_devices": board.num_devices,
            "makespan_s": measured.makespan_s,
            "bound_s": measured.bound_s,
            "gap": measured.gap,
            "predicted_s": board.prediction.makespan_s if board.prediction else None,
            "policies": policies,
            "resumed": resumed,
        }
    best_name = best.name if best else None
    return StudyResult(name=name, trials=board.entries, best=best_name, interrupted=interrupted, **figures)


def save_result(result: StudyResult, board: Board, folder: Path) -> None:
    """Writes results.json, the timeline as a trace and, where matplotlib is installed, as a picture, and the losses."""
    names = {"results": "results.json", "timeline": "timeline.svg", "trace": "timeline.trace.json"}
    if not can_plot():
        del names["timeline"]
    result.paths |= {kind: str(folder / name) for kind, name in names.items()}
    if board.turns or not (folder / "timeline.trace.json").exists():
        outcome = board.measured()
        trials = [entry.name for entry in board.entries]
        devices = f"{result.policy} on {result.num_devices} devices"
        title = f"{result.name}: {devices}, {outcome.gap:.1%} over the lower bound"
        if "timeline" in names:
            write_atomically(folder / "timeline.svg", picture(outcome, trials, board.num_devices, title=title))
        write_atomically(folder / "timeline.trace.json", json.dumps(trace(outcome, trials)) + "\n")
    for row in result.trials:
        held_out = dict(row.held_out)
        lines = ""
        for step, loss in enumerate(row.losses, 1):
            line = {"step": step, "loss": loss}
            if step in held_out:
                line["held_out"] = plain(held_out[step])
            lines += json.dumps(line) + "\n"
        write_atomically(folder / "trials" / row.name / "metrics.jsonl", lines)
    write_sealed(folder / "results.json", result.as_dict(), indent=1)


def write_entry(entry: TrialProgress, folder: Path) -> None:
    """Writes the end of a trial, for a study that is resumed."""
    write_sealed(folder / "trials" / entry.name / "trial.json", {"format": _ENDED, **entry.as_dict()}, indent=1)


def read_entry(number: int, trial: Trial, name: str, folder: Path) -> TrialProgress:
    """A trial that an earlier run of the study has ended; else a new one.

    Raises:
        StudyError: the file of its end is damaged.
    """
    entry = TrialProgress(number, trial, name)
    if row := _kept(folder / "trials" / name / "trial.json", _ENDED, "the trial is then trained again"):
        entry.restore(row)
    return entry


def _kept(path: Path, form: str, consequence: str) -> JsonObject | None:
    """A dispensable document of an earlier run; None: there is none.

    Raises:
        StudyError: it is damaged.
    """
    if path.exists():
        return reread(path, form, f"remove it and resume: {consequence}")
    return None


def reread(path: Path, form: str, cure: str) -> JsonObject:
    """A document that an earlier run has written.

    Raises:
        StudyError: it is damaged, or of another version.
    """
    try:
        return read_sealed(path, form, StudyError)
    except StudyError as problem:
        raise StudyError(f"{problem}; {cure}") from None


# ---- as text -------------------------------------------------------------------------------------------------------


def loss_text(value: float | None) -> str:
    """A loss for people, in few digits for a trial that diverges; empty where there is none.

    >>> [loss_text(0.25), loss_text(4.1827e28), loss_text(None)]
    ['0.2500', '4.183e+28', '']
    """
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) < 1e6:
        return f"{value:.4f}"
    return f"{value:.4g}"


def table_of(result: StudyResult) -> str:
    """A study's result for people: a row for each trial, reasons of their ends, the figures, and the paths of files."""
    score = "held-out" if any(row.held_out for row in result.trials) else "score"
    head = ("trial", "status", "steps", score, "loss", "shards", "parameters", "busy", "moves")
    rows: list[tuple[str, ...]] = [head]
    reasons: dict[str, list[str]] = {}
    for row in result.trials:
        mark = "* " if row.name == result.best else "  "
        losses = loss_text(row.score), loss_text(row.last_loss)
        parameters = f"{row.parameters:,}" if row.parameters else ""
        busy = format_seconds(row.busy_s) if row.busy_s else ""
        cells = [mark + row.name, row.status, row.steps, *losses, row.shards or "", parameters, busy, row.moves]
        rows.append(tuple(map(str, cells)))
        if row.reason:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    lines = [*columns(rows), ""]
    lines += [f"{', '.join(names)} {reason}" for reason, names in reasons.items()]
    makespan = "makespan since it was resumed" if result.resumed else "makespan"
    measured = f"{makespan} {format_seconds(result.makespan_s)}, lower bound {format_seconds(result.bound_s)}"
    lines.append(f"{result.policy} on {counted(result.num_devices, 'device')}: {measured}, gap {result.gap:.1%}")
    if result.predicted_s is not None:
        lines.append(f"predicted after the first turns, with no trial stopped: {format_seconds(result.predicted_s)}")
    if result.policies:
        others = []
        for name, under in result.policies.items():
            others.append(f"{name} {format_seconds(under['makespan_s'])} ({under['gap']:+.1%})")
        lines.append(f"simulated with the measured turns, without any wait: {', '.join(others)}")
    if largest := max((row.device_bytes for row in result.trials), default=0):
        lines.append(f"the largest shard needs {format_bytes(largest)} on its device")
    return "\n".join([*lines, "", *columns(list(result.paths.items()))])
