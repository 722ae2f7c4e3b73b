"""The result of a study: numbers, a table for people, files.

Files that a resumed study reads back carry a checksum.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipefit.draw.chart import can_plot
from pipefit.spec.files import write_atomically
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.study.board import Board, TrialProgress
from pipefit.study.picture import picture, trace
from pipefit.study.simulation import POLICIES
from pipefit.study.trial import Admitted, StudyError, Trial, plain
from pipefit.units import columns, counted, format_bytes, format_seconds

_RESULT, _ENDED = "pipefit.study-result/1", "pipefit.study-trial/1"


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        name: of the trial.
        values: in which it differs from others.
        status: "finished", "stopped", "failed", or where it stands in a study that was interrupted.
        reason: why it did not finish.
        steps: done.
        score: its last loss on held-out data; without such, the mean loss of the last tenth of its steps.
        last_loss: of its last step.
        losses: of every step.
        held_out: (step, loss) of every evaluation on held-out data, steps from 1.
        shards: parts of its model.
        parameters: of its model.
        busy_s: seconds of devices that it took, reading and writing included.
        moved_s: of that, reading and writing its state.
        moves: how often it changed its device.
        device_bytes: its largest shard needs, by its profile; 0: not measured.
    """

    name: str
    values: dict[str, Any]
    status: str
    reason: str
    steps: int
    score: float | None
    last_loss: float | None
    losses: list[float]
    held_out: list[tuple[int, float]]
    shards: int
    parameters: int
    busy_s: float
    moved_s: float
    moves: int
    device_bytes: float


@dataclass
class StudyResult:
    """A study's outcome.

    Attributes:
        name: of the study.
        policy: that chose the turns.
        num_devices: workers.
        trials: in the order of the study.
        best: name of the trial with the lowest score; None: none ended well.
        makespan_s: measured, from the first turn to the last.
        bound_s: no policy is faster for the same turns: max(longest trial, total / devices).
        gap: makespan over bound, minus one.
        predicted_s: the makespan, simulated after the first turns of each trial; None: a trial began too late for that.
        policies: for every policy the makespan and gap, simulated with the measured turns.
        interrupted: it was stopped before its end, and can be resumed.
        resumed: figures of time are of this run only, which resumed an earlier one.
        paths: of its files.
    """

    name: str
    policy: str
    num_devices: int
    trials: list[TrialResult]
    best: str | None
    makespan_s: float
    bound_s: float
    gap: float
    predicted_s: float | None
    policies: dict[str, tuple[float, float]]
    interrupted: bool = False
    resumed: bool = False
    paths: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TrialResult:
        return {row.name: row for row in self.trials}[name]

    def __str__(self) -> str:
        return table_of(self)

    @property
    def num_failed(self) -> int:
        """Trials that failed."""
        return sum(row.status == "failed" for row in self.trials)

    def as_dict(self) -> dict[str, Any]:
        """As JSON data; numbers that are not finite are None."""
        policies = {name: {"makespan_s": s, "gap": more} for name, (s, more) in self.policies.items()}
        data = {key: value for key, value in vars(self).items() if key not in ("trials", "policies")}
        return {"format": _RESULT, **data, "policies": policies, "trials": [dict(vars(row)) for row in self.trials]}


def result_of(
    board: Board, name: str, predicted_s: float | None, interrupted: bool, resumed: bool = False
) -> StudyResult:
    """The result so far."""
    measured, best = board.measured(), board.best
    simulated = {policy: board.in_hindsight(policy) for policy in POLICIES if board.turns}
    return StudyResult(
        name=name,
        policy=board.policy,
        num_devices=board.num_devices,
        trials=[_result_of_trial(entry) for entry in board.entries],
        best=best.name if best else None,
        makespan_s=measured.makespan_s,
        bound_s=measured.bound_s,
        gap=measured.gap,
        predicted_s=predicted_s,
        policies={policy: (found.makespan_s, found.gap) for policy, found in simulated.items()},
        interrupted=interrupted,
        resumed=resumed,
    )


def with_figures_of(result: StudyResult, folder: Path) -> StudyResult:
    """The result of a run that had nothing left to do, with the times that the earlier run has measured."""
    before = _reread(folder / "results.json", _RESULT, "figures of earlier runs are then lost")
    if before is None:
        return result
    figures = {name: before[name] for name in ("policy", "num_devices", "makespan_s", "bound_s", "gap", "predicted_s")}
    policies = {name: (found["makespan_s"], found["gap"]) for name, found in before["policies"].items()}
    return replace(result, **figures, policies=policies, resumed=before["resumed"])


def _result_of_trial(entry: TrialProgress) -> TrialResult:
    admitted = entry.admitted or Admitted(0, 0, 0, 0)
    return TrialResult(
        name=entry.name,
        values=dict(entry.trial.values),
        status=entry.status,
        reason=entry.reason,
        steps=len(entry.losses),
        score=_finite(entry.score),
        last_loss=_finite(entry.losses[-1]) if entry.losses else None,
        losses=list(entry.losses),
        held_out=[(step, value) for step, value in enumerate(entry.held_out, 1) if math.isfinite(value)],
        shards=admitted.num_shards,
        parameters=admitted.parameters,
        busy_s=entry.busy_s,
        moved_s=entry.moved_s,
        moves=entry.moves,
        device_bytes=admitted.device_bytes,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def save_result(result: StudyResult, board: Board, folder: Path) -> None:
    """Writes results.json, the timeline as a trace and, where matplotlib is installed, as a picture, and the losses."""
    drawn = {"timeline": "timeline.svg"} if can_plot() else {}
    names = {"results": "results.json", **drawn, "trace": "timeline.trace.json"}
    result.paths |= {kind: str(folder / name) for kind, name in names.items()}
    if board.turns or not (folder / "timeline.trace.json").exists():
        outcome, trials = board.measured(), [entry.name for entry in board.entries]
        title = (
            f"{result.name}: {result.policy} on {result.num_devices} devices, {outcome.gap:.1%} over the lower bound"
        )
        if drawn:
            write_atomically(folder / "timeline.svg", picture(outcome, trials, board.num_devices, title=title))
        write_atomically(folder / "timeline.trace.json", json.dumps(trace(outcome, trials)) + "\n")
    for row in result.trials:
        held_out, lines = dict(row.held_out), []
        for step, loss in enumerate(row.losses, 1):
            evaluated = {"held_out": held_out[step]} if step in held_out else {}
            lines.append(json.dumps({"step": step, "loss": _finite(loss), **evaluated}) + "\n")
        write_atomically(folder / "trials" / row.name / "metrics.jsonl", "".join(lines))
    write_sealed(folder / "results.json", result.as_dict(), indent=1)


_KEPT = ("status", "reason", "losses", "held_out", "busy_s", "moved_s", "moves", "admitted")
"""Of a trial that has ended."""


def write_entry(entry: TrialProgress, folder: Path) -> None:
    """Writes how a trial has ended, for a study that is resumed."""
    data = {key: getattr(entry, key) for key in _KEPT}
    finite = {key: [_finite(loss) for loss in data[key]] for key in ("losses", "held_out")}
    data = {"format": _ENDED, **data, **finite, "values": dict(entry.trial.values)}
    write_sealed(folder / "trials" / entry.name / "trial.json", plain(data), indent=1)


def read_entry(number: int, trial: Trial, name: str, folder: Path) -> TrialProgress:
    """A trial as an earlier run of the study has ended it; else a new one.

    Raises:
        StudyError: the file of its end is damaged.
    """
    entry = TrialProgress(number, trial, name)
    before = _reread(folder / "trials" / name / "trial.json", _ENDED, "the trial is then trained anew")
    if before is not None:
        for key in ("losses", "held_out"):
            before[key] = [math.nan if loss is None else loss for loss in before[key]]
        before["admitted"] = Admitted(*before["admitted"]) if before["admitted"] else None
        for key in _KEPT:
            setattr(entry, key, before[key])
        entry.step = len(entry.losses)
    return entry


def _reread(path: Path, form: str, consequence: str) -> dict[str, Any] | None:
    """A document of an earlier run; None: there is none.

    Raises:
        StudyError: it is damaged.
    """
    try:
        return read_sealed(path, form, StudyError)
    except FileNotFoundError:
        return None
    except StudyError as problem:
        raise StudyError(f"{problem}; remove it and resume: {consequence}") from None


# ---- as text -------------------------------------------------------------------------------------------------------


def loss_text(value: float | None) -> str:
    """A loss for people, those of a trial that diverges in few digits; nothing where there is none.

    >>> [loss_text(0.25), loss_text(4.1827e28), loss_text(None)]
    ['0.2500', '4.183e+28', '']
    """
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def table_of(result: StudyResult) -> str:
    """A study's result for people: a row for each trial, why trials ended, the figures, and the paths of files."""
    score = "held-out" if any(row.held_out for row in result.trials) else "score"
    rows: list[tuple[str, ...]] = [("trial", "status", "steps", score, "loss", "shards", "parameters", "busy", "moves")]
    reasons: dict[str, list[str]] = {}
    for row in result.trials:
        name = ("* " if row.name == result.best else "  ") + row.name
        losses = loss_text(row.score), loss_text(row.last_loss)
        parameters = f"{row.parameters:,}" if row.parameters else ""
        busy = format_seconds(row.busy_s) if row.busy_s else ""
        rows.append(
            (name, row.status, f"{row.steps}", *losses, f"{row.shards or ''}", parameters, busy, f"{row.moves}")
        )
        if row.reason:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    lines = [*columns(rows), "", *(f"{', '.join(names)} {reason}" for reason, names in reasons.items())]
    makespan = "makespan since it was resumed" if result.resumed else "makespan"
    measured = f"{makespan} {format_seconds(result.makespan_s)}, lower bound {format_seconds(result.bound_s)}"
    lines.append(f"{result.policy} on {counted(result.num_devices, 'device')}: {measured}, gap {result.gap:.1%}")
    if result.predicted_s is not None:
        lines.append(f"predicted after the first turns, with no trial stopped: {format_seconds(result.predicted_s)}")
    if result.policies:
        others = (f"{name} {format_seconds(s)} ({more:+.1%})" for name, (s, more) in result.policies.items())
        lines.append("simulated with the measured turns: " + ", ".join(others))
    if largest := max((row.device_bytes for row in result.trials), default=0):
        lines.append(f"the largest shard needs {format_bytes(largest)} on its device")
    return "\n".join([*lines, "", *columns(list(result.paths.items()))])
