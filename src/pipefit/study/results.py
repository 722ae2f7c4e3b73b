"""The result of a study: numbers, a table for people, files.

Files that a resumed study reads back carry a checksum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipefit.spec.files import write_atomically
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.study.board import Board, TrialProgress
from pipefit.study.picture import picture, trace
from pipefit.study.simulation import POLICIES
from pipefit.study.trial import StudyError, plain
from pipefit.units import columns, format_bytes, format_seconds

__all__ = [
    "StudyResult",
    "TrialResult",
    "loss_text",
    "read_entry",
    "result_of",
    "save_result",
    "with_figures_of",
    "write_entry",
]


_RESULT, _ENDED = "pipefit.study-result/1", "pipefit.study-trial/1"


@dataclass(frozen=True)
class TrialResult:
    """A trial's line.

    Attributes:
        name: of the trial.
        values: that tell it apart.
        status: "finished", "stopped", "failed", or where it stands in a study that was interrupted.
        reason: why it did not finish.
        steps: done.
        score: its last loss on held-out data; without such, the mean loss of the last tenth of its steps.
        last_loss: of its last step.
        losses: of every step.
        held_out: (step, loss) of every evaluation on held-out data, steps from 1.
        shards: it was cut into.
        parameters: of its model.
        busy_s: seconds of devices it took, reading and writing included.
        moved_s: of that, reading and writing its state.
        moves: how often another device took it over.
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
        policy: that dealt out the turns.
        num_devices: workers.
        trials: in the order of the study.
        best: name of the trial with the lowest score; None: none ended well.
        makespan_s: measured, from the first turn to the last.
        bound_s: no policy is faster for the same turns: max(longest trial, total / devices).
        gap: makespan over bound, minus one.
        predicted_s: the makespan on paper, from the first turns of each trial; None: trials came too late for that.
        policies: for every policy the makespan and gap on paper, with every turn as long as it was.
        interrupted: it was stopped before its end and can be resumed.
        resumed: figures of time are of this run alone, an earlier one did the rest.
        paths: of what it left.
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
        for row in self.trials:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        return table_of(self)

    @property
    def num_failed(self) -> int:
        """Trials that failed."""
        return sum(row.status == "failed" for row in self.trials)

    def as_dict(self) -> dict[str, Any]:
        """As JSON data; what is no finite number is None."""
        data = {key: getattr(self, key) for key in self.__dataclass_fields__ if key not in ("trials", "policies")}
        rows = [{key: getattr(row, key) for key in TrialResult.__dataclass_fields__} for row in self.trials]
        policies = {name: {"makespan_s": s, "gap": more} for name, (s, more) in self.policies.items()}
        return {"format": _RESULT, **data, "policies": policies, "trials": rows}


def result_of(
    board: Board, name: str, predicted_s: float | None, interrupted: bool, resumed: bool = False
) -> StudyResult:
    """The result as the board stands."""
    measured = board.measured()
    policies: dict[str, tuple[float, float]] = {}
    for policy in POLICIES if board.turns else ():
        found = board.in_hindsight(policy)
        policies[policy] = (found.makespan_s, found.gap)
    best = board.best
    return StudyResult(
        name=name,
        policy=board.policy,
        num_devices=board.num_devices,
        trials=[_row(entry) for entry in board.entries],
        best=best.name if best else None,
        makespan_s=measured.makespan_s,
        bound_s=measured.bound_s,
        gap=measured.gap,
        predicted_s=predicted_s,
        policies=policies,
        interrupted=interrupted,
        resumed=resumed,
    )


def with_figures_of(result: StudyResult, folder: Path) -> StudyResult:
    """The result of a run that found nothing left to do, with the times that the earlier one has measured."""
    before = _reread(folder / "results.json", _RESULT, "figures of earlier runs are then lost")
    if before is None:
        return result
    figures = {name: before[name] for name in ("policy", "num_devices", "makespan_s", "bound_s", "gap", "predicted_s")}
    policies = {name: (found["makespan_s"], found["gap"]) for name, found in before["policies"].items()}
    return replace(result, **figures, policies=policies, resumed=before["resumed"])


def _row(entry: TrialProgress) -> TrialResult:
    admitted = entry.admitted
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
        shards=admitted.num_shards if admitted else 0,
        parameters=admitted.parameters if admitted else 0,
        busy_s=entry.busy_s,
        moved_s=entry.moved_s,
        moves=entry.moves,
        device_bytes=admitted.device_bytes if admitted else 0.0,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def save_result(result: StudyResult, board: Board, folder: Path) -> None:
    """Writes results.json, the timeline as a picture and as a trace, and the losses of each trial."""
    result.paths |= {"results": str(folder / "results.json"), "timeline": str(folder / "timeline.svg")}
    result.paths |= {"trace": str(folder / "timeline.trace.json")}
    if board.turns or not (folder / "timeline.svg").exists():
        _save_timeline(result, board, folder)
    for row in result.trials:
        found = dict(row.held_out)
        told = ({"held_out": found[step]} if step in found else {} for step in range(1, len(row.losses) + 1))
        steps = enumerate(zip(row.losses, told, strict=True), 1)
        lines = [json.dumps({"step": step, "loss": _finite(loss), **more}) for step, (loss, more) in steps]
        write_atomically(folder / "trials" / row.name / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
    write_sealed(folder / "results.json", result.as_dict(), indent=1)


def _save_timeline(result: StudyResult, board: Board, folder: Path) -> None:
    outcome, names = board.measured(), [entry.name for entry in board.entries]
    title = f"{result.name}: {result.policy} on {result.num_devices} devices, {outcome.gap:.1%} over the lower bound"
    write_atomically(folder / "timeline.svg", picture(outcome, names, board.num_devices, title=title))
    write_atomically(folder / "timeline.trace.json", json.dumps(trace(outcome, names)) + "\n")


def write_entry(entry: TrialProgress, folder: Path) -> None:
    """Keeps how a trial has ended, so that a study that is resumed knows."""
    data = {
        "format": _ENDED,
        "status": entry.status,
        "reason": entry.reason,
        "losses": [_finite(loss) for loss in entry.losses],
        "held_out": [_finite(loss) for loss in entry.held_out],
        "busy_s": entry.busy_s,
        "moved_s": entry.moved_s,
        "moves": entry.moves,
        "admitted": list(entry.admitted) if entry.admitted else None,
        "values": dict(entry.trial.values),
    }
    write_sealed(folder / "trials" / entry.name / "trial.json", plain(data), indent=1)


def read_entry(name: str, folder: Path) -> Mapping[str, Any] | None:
    """How a trial has ended in an earlier run of the study; None: it has not.

    Raises:
        StudyError: the file is damaged.
    """
    return _reread(folder / "trials" / name / "trial.json", _ENDED, "the trial is then trained anew")


def _reread(path: Path, form: str, consequence: str) -> dict[str, Any] | None:
    """A document that an earlier run has written; None: it has not.

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
    """A study's result for people: a row for each trial, why trials ended, the figures, and where things are."""
    score = "held-out" if any(row.held_out for row in result.trials) else "score"
    head = ("trial", "status", "steps", score, "loss", "shards", "parameters", "busy", "moves")
    rows: list[tuple[str, ...]] = [head]
    for row in result.trials:
        rows.append(
            (
                ("* " if row.name == result.best else "  ") + row.name,
                row.status,
                str(row.steps),
                loss_text(row.score),
                loss_text(row.last_loss),
                str(row.shards or ""),
                f"{row.parameters:,}" if row.parameters else "",
                format_seconds(row.busy_s) if row.busy_s else "",
                str(row.moves),
            )
        )
    lines = [*columns(rows), ""]
    reasons: dict[str, list[str]] = {}
    for row in result.trials:
        if row.reason:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    lines += [f"{', '.join(names)} {reason}" for reason, names in reasons.items()]
    makespan = "makespan since it was resumed" if result.resumed else "makespan"
    measured = f"{makespan} {format_seconds(result.makespan_s)}, lower bound {format_seconds(result.bound_s)}"
    devices = f"{result.num_devices} device{'s' if result.num_devices > 1 else ''}"
    lines.append(f"{result.policy} on {devices}: {measured}, gap {result.gap:.1%}")
    if result.predicted_s is not None:
        lines.append(f"predicted after the first turns, with no trial stopped: {format_seconds(result.predicted_s)}")
    if result.policies:
        others = (f"{name} {format_seconds(s)} ({more:+.1%})" for name, (s, more) in result.policies.items())
        lines.append("on paper, with the turns as they were: " + ", ".join(others))
    largest = max((row.device_bytes for row in result.trials), default=0)
    if largest:
        lines.append(f"the largest shard needs {format_bytes(largest)} on its device")
    width = max(map(len, result.paths), default=0)
    lines += ["", *(f"{name:<{width}}  {path}" for name, path in result.paths.items())]
    return "\n".join(lines)
