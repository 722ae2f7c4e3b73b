"""What a study gave: numbers, a table for people, files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipefit.spec.files import read_json, write_atomically, write_json
from pipefit.study.board import Board
from pipefit.study.entry import Entry
from pipefit.study.picture import picture, trace
from pipefit.study.policies import POLICIES
from pipefit.study.table import table_of

__all__ = ["Row", "StudyResult", "read_entry", "result_of", "save_result", "with_figures_of", "write_entry"]


@dataclass(frozen=True)
class Row:
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
    trials: list[Row]
    best: str | None
    makespan_s: float
    bound_s: float
    gap: float
    predicted_s: float | None
    policies: dict[str, tuple[float, float]]
    interrupted: bool = False
    resumed: bool = False
    paths: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Row:
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
        rows = [{key: getattr(row, key) for key in Row.__dataclass_fields__} for row in self.trials]
        policies = {name: {"makespan_s": s, "gap": more} for name, (s, more) in self.policies.items()}
        return {"format": "pipefit.study-result/1", **data, "policies": policies, "trials": rows}


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
    path = folder / "results.json"
    if not path.exists():
        return result
    before = read_json(path)
    figures = {name: before[name] for name in ("policy", "num_devices", "makespan_s", "bound_s", "gap", "predicted_s")}
    policies = {name: (found["makespan_s"], found["gap"]) for name, found in before["policies"].items()}
    return replace(result, **figures, policies=policies, resumed=before["resumed"])


def _row(entry: Entry) -> Row:
    admitted = entry.admitted
    return Row(
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
    write_json(folder / "results.json", result.as_dict())


def _save_timeline(result: StudyResult, board: Board, folder: Path) -> None:
    outcome, names = board.measured(), [entry.name for entry in board.entries]
    title = f"{result.name}: {result.policy} on {result.num_devices} devices, {outcome.gap:.1%} over the lower bound"
    write_atomically(folder / "timeline.svg", picture(outcome, names, board.num_devices, title=title))
    write_atomically(folder / "timeline.trace.json", json.dumps(trace(outcome, names)) + "\n")


def write_entry(entry: Entry, folder: Path) -> None:
    """Keeps how a trial has ended, so that a study that is resumed knows."""
    data = {
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
    write_json(folder / "trials" / entry.name / "trial.json", data)


def read_entry(name: str, folder: Path) -> Mapping[str, Any] | None:
    """How a trial has ended in an earlier run of the study; None: it has not."""
    path = folder / "trials" / name / "trial.json"
    return read_json(path) if path.exists() else None
