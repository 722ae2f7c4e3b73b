"""Resuming from the records of a disk tier: what must be the same as in the run that was cut off, and which step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pipefit.checkpoint.committed import rank_state
from pipefit.errors import PlanError, TierError
from pipefit.runtime.collectives import agree, attempt, exchange
from pipefit.runtime.session import Session, current
from pipefit.spec import Plan
from pipefit.spec.options import Spilled
from pipefit.spill.rank import Spilling, SpillPlace, tier_name
from pipefit.spill.tier_file import Commit, read_commits, read_table
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer, Training

_MOST_NAMED = 3
_MISSING = "nothing"
_OF_A_PLAN = ("prediction", "candidates", "plan_seconds", "method", "model")


def identity(layers: Sequence[NamedLayer], plan: Plan, training: Training, about: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run as JSON data: all that decides its numbers and where they lie.

    Args:
        layers: of the whole model.
        plan: of the run.
        training: its loss, clipping and the like.
        about: what the caller has to add.
    """
    facts = {
        "run": dict(about),
        "model": {
            name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for layer in layers
            for name, value in layer.module.state_dict(prefix=layer.dotted).items()
            if hasattr(value, "dtype")
        },
        "plan": {key: value for key, value in msgspec.to_builtins(plan).items() if key not in _OF_A_PLAN},
        "optimizer": _facts_of(training.optimizer),
        "training": {
            "seed": training.seed,
            "clip_norm": training.clip_norm,
            "precision": str(training.half or "fp32").removeprefix("torch."),
            "loss_scale": training.loss_scale,
        },
    }
    return dict(json.loads(json.dumps(facts)))


def resumed_folder(spill: Spilled) -> Path:
    """The folder of the records that a run resumes from.

    Raises:
        PlanError: it has none.
    """
    if spill.folder is None:
        raise PlanError("spill=Spilled(resume=True) needs the disk= that the records are on")
    return spill.folder


def place_of(
    spill: Spilled, layers: Sequence[NamedLayer], plan: Plan, training: Training, session: Session
) -> SpillPlace:
    """The place of spilled stages, with what identifies the run; the records that it resumes from must be its own.

    Raises:
        TierError: they are of another run.
    """
    about = identity(layers, plan, training, spill.about)
    if spill.resume is not False:
        folder = resumed_folder(spill)
        recorded_plan(folder, session.rank)
        check_same(folder, session.rank, about)
    return SpillPlace(spill.folder, spill.host_bytes, about=about, resume=spill.resume, commits=spill.commit_every != 0)


def _facts_of(make: MakeOptimizer) -> dict[str, Any]:
    """The kind and settings of an optimizer; nothing where it needs particular parameters."""
    try:
        made = make([nn.Parameter(torch.zeros(1))])
    except Exception:
        return {}
    plain = {key: value for key, value in made.defaults.items() if isinstance(value, int | float | str | list | tuple)}
    return {"kind": type(made).__name__, **plain}


def check_same(folder: Path, rank: int, facts: Mapping[str, Any], parts: Sequence[str] = ()) -> None:
    """Refuses the records of a folder if they are not those of a run.

    Args:
        folder: of the tier.
        rank: whose records.
        facts: see `identity`.
        parts: of the facts to look at; (): all.

    Raises:
        TierError: they are of another run; the message says what differs.
    """
    _, before = read_table(folder, tier_name(rank))
    wanted = parts or tuple(facts)
    found = list(_differences({part: before.get(part, {}) for part in wanted}, {p: facts[p] for p in wanted}))
    if found:
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise TierError(
            f"{folder} holds the records of another run: {'; '.join(found[:_MOST_NAMED])}{more}; "
            "ask for the same as there, or resume from a checkpoint"
        )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Differences between two trees of JSON data, each in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            # An option of a run has a name that needs no other, like --lr.
            inner = key if not name or name == "run" else f"{name} {key}"
            yield from _differences(before.get(key, _MISSING), now.get(key, _MISSING), inner)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and _are_tables(before):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, f"{name} {index}")
    # An option that is not given is the same as one that was not known then.
    elif before != now and not (_is_empty(before) and _is_empty(now)):
        yield f"{name} was {_short(before)}, is {_short(now)}"


def _is_empty(value: Any) -> bool:
    return not value or value == _MISSING


def _are_tables(value: list[Any]) -> bool:
    return all(isinstance(item, dict) for item in value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def recorded_plan(folder: Path, rank: int) -> Plan:
    """The plan of the run whose records a folder holds.

    Raises:
        TierError: there are none, or none that can be resumed from.
    """
    commits = read_commits(folder, tier_name(rank))
    if not commits:
        raise TierError(f"{folder}: no step was committed there; begin anew, or resume from a checkpoint")
    _check_reason(commits[0])
    _, about = read_table(folder, tier_name(rank))
    try:
        return msgspec.convert(about["plan"], Plan)
    except (KeyError, msgspec.ValidationError) as problem:
        raise TierError(f"{folder}: the plan there cannot be read: {problem}; resume from a checkpoint") from None


def committed_step(folder: str | Path, rank: int | None = None) -> int | None:
    """The last step that a run which has not ended committed in a folder, and that can be resumed from.

    Args:
        folder: of the disk tier.
        rank: whose records; None: those of this process's rank.

    Raises:
        TierError: there is something that cannot be read.
    """
    found = read_commits(Path(folder), tier_name(current().rank if rank is None else rank))
    return found[0].step if found and not rank_state(found[0]).reason else None


def agree_on_step(session: Session, spillings: Sequence[Spilling | None]) -> None:
    """All ranks take the records of the same step: the last that every one of them has committed.

    Raises:
        TierError: there is none.
    """
    try:
        _agree(session, spillings)
    except TierError:
        for spilling in spillings:
            if spilling is not None:
                spilling.close()
        raise


def _agree(session: Session, spillings: Sequence[Spilling | None]) -> None:
    agree(session, attempt(lambda: _check_all(spillings)), TierError)
    own = [spilling for spilling in spillings if spilling is not None]
    least = -1
    while True:
        steps = [s.resumed.step for s in own if s.resumed is not None]
        found = [step for of_rank in exchange(session, steps) for step in of_rank]
        if least == min(found) == max(found):
            return
        least = min(found)
        agree(session, attempt(partial(_go_back, own, least)), TierError)


def _go_back(spillings: Sequence[Spilling], step: int) -> None:
    for spilling in spillings:
        spilling.resume_from(step)


def _check_all(spillings: Sequence[Spilling | None]) -> None:
    for spilling in spillings:
        if spilling is None:
            raise TierError("a rank has all its stages on the device; resume from a checkpoint")
        assert spilling.resumed is not None
        _check_reason(spilling.resumed)


def _check_reason(committed: Commit) -> None:
    reason = rank_state(committed).reason
    if reason:
        raise TierError(f"step {committed.step} cannot be resumed from: {reason}; resume from a checkpoint")
