"""Resuming from the records of a disk tier: the identity of the interrupted run, and the choice of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pipefit.checkpoint.committed import rank_state
from pipefit.errors import PlanError, TierError
from pipefit.parallel.alike import differences
from pipefit.runtime.collectives import agree, attempt, exchange
from pipefit.runtime.session import Session, current
from pipefit.spec import Plan
from pipefit.spec.arguments import Amount, checked
from pipefit.spec.files import JsonObject
from pipefit.spec.options import Spilled
from pipefit.spill.rank import Spilling, tier_name
from pipefit.spill.tier_file import Commit, read_about, read_commits
from pipefit.stage.optimizing import OptimizerMaker
from pipefit.stage.record_layout import name_of
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer, Training

_MOST_NAMED = 3
_OF_A_PLAN = ("prediction", "candidates", "plan_seconds", "method", "model")


def identity(layers: Sequence[NamedLayer], plan: Plan, training: Training, about: Mapping[str, Any]) -> JsonObject:
    """The identity of a run as JSON data: all settings that determine its numbers and their places.

    Args:
        layers: of the whole model.
        plan: of the run.
        training: its loss, clipping and the like.
        about: further data of the caller.
    """
    forms = {}
    for layer in layers:
        for name, value in layer.module.state_dict(prefix=layer.dotted).items():
            if hasattr(value, "dtype"):
                forms[name] = f"{name_of(value.dtype)}{list(value.shape)}"
    facts_of_plan = msgspec.to_builtins(plan)
    facts = {
        "run": dict(about),
        "model": forms,
        "plan": {key: facts_of_plan[key] for key in facts_of_plan if key not in _OF_A_PLAN},
        "optimizer": optimizer_facts(training.optimizer),
        "training": {
            "seed": training.seed,
            "clip_norm": training.clip_norm,
            "precision": str(training.half or "fp32").removeprefix("torch."),
            "compile": training.compiler,
            "loss_scale": training.loss_scale,
        },
    }
    return dict(json.loads(json.dumps(facts)))


def resumed_folder(spill: Spilled) -> Path:
    """The folder of the records from which a run resumes.

    Raises:
        PlanError: there is none.
    """
    if spill.folder is None:
        raise PlanError("spill=Spilled(resume=True) needs disk=, the folder of the records")
    return spill.folder


def identified(
    spill: Spilled, layers: Sequence[NamedLayer], plan: Plan, training: Training, session: Session
) -> Spilled:
    """The options of spilling with the identity of the run; the records from which it resumes must be its own.

    Raises:
        TierError: they are of another run.
    """
    about = identity(layers, plan, training, spill.about)
    if spill.resume is not False:
        folder = resumed_folder(spill)
        recorded_plan(folder, session.rank)
        check_same(folder, session.rank, about)
    return replace(spill, about=about)


def optimizer_facts(make: MakeOptimizer) -> JsonObject:
    """The kind and settings of an optimizer; nothing where it needs particular parameters."""
    try:
        made = make([nn.Parameter(torch.zeros(1))])
    except Exception:
        return {}
    facts: JsonObject = {"kind": type(made).__name__}
    for key, value in made.defaults.items():
        if isinstance(value, int | float | str | list | tuple):
            facts[key] = value
    facts["no_decay"] = []
    if isinstance(make, OptimizerMaker):
        facts["no_decay"] = list(make.no_decay)
    return facts


def check_same(folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
    """Refuses the records of a folder if they are not those of a run.

    Args:
        folder: of the tier.
        rank: of the records.
        facts: see `identity`, or some of them.

    Raises:
        TierError: they are of another run; the message names the differences.
    """
    before = read_about(folder, tier_name(rank))
    was = dict(_leaves({part: before.get(part) for part in facts}))
    now = dict(_leaves(facts))
    found = []
    for name in {**was, **now}:
        # An option that is not given is equal to one that did not exist then.
        if (was.get(name) or None) != (now.get(name) or None):
            found.append(f"{name} was {_short(was, name)}, is {_short(now, name)}")
    if found:
        more = ""
        if len(found) > _MOST_NAMED:
            more = f", and {len(found) - _MOST_NAMED} more"
        raise TierError(
            f"{folder} holds the records of another run: {'; '.join(found[:_MOST_NAMED])}{more}; "
            "give the same options as there, or resume from a checkpoint"
        )


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in JSON data, each with the path of names to it."""
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        # An option of a run has a name that needs no other, like --lr.
        path = str(key)
        if name not in ("", "run"):
            path = f"{name} {key}"
        yield from _leaves(value, path)


def _short(leaves: Mapping[str, Any], name: str) -> str:
    value = leaves.get(name, "nothing")
    if isinstance(value, str) and value:
        text = value
    else:
        text = json.dumps(value)
    if len(text) <= 60:
        return text
    return text[:57] + "…"


def recorded_plan(folder: Path, rank: int) -> Plan:
    """The plan of the run whose records are in a folder.

    Raises:
        TierError: there are no records, or none from which a run can resume.
    """
    commits = read_commits(folder, tier_name(rank))
    if not commits:
        raise TierError(f"{folder}: no step was committed there; start a new run, or resume from a checkpoint")
    _check_reason(commits[0])
    about = read_about(folder, tier_name(rank))
    try:
        return msgspec.convert(about["plan"], Plan)
    except (KeyError, msgspec.ValidationError) as problem:
        raise TierError(f"{folder}: the plan there cannot be read: {problem}; resume from a checkpoint") from None


@checked()
def committed_step(folder: str | Path, rank: Amount | None = None) -> int | None:
    """The last committed step in a folder from which an interrupted run can resume; None: there is none.

    Args:
        folder: of the disk tier.
        rank: of the records; None: this process's rank.

    Raises:
        TierError: a file there cannot be read.
    """
    if rank is None:
        rank = current().rank
    found = read_commits(Path(folder), tier_name(rank))
    if found and not rank_state(found[0]).reason:
        return found[0].step
    return None


def agree_on_step(session: Session, spillings: Sequence[Spilling | None]) -> None:
    """Makes all ranks resume from the same step: the last that every one of them has committed.

    Raises:
        TierError: there is none.
    """
    own = [spilling for spilling in spillings if spilling is not None]
    try:
        agree(session, attempt(lambda: _check_all(spillings)), TierError)
        runs = [{"run": spilling.resumed.run} for spilling in own if spilling.resumed is not None]
        _check_one_run(exchange(session, runs))
        least = -1
        while True:
            steps = [spilling.resumed.step for spilling in own if spilling.resumed is not None]
            found = {step for of_rank in exchange(session, steps) for step in of_rank}
            if found == {least}:
                return
            least = min(found)
            agree(session, attempt(partial(_resume_all, own, least)), TierError)
    except TierError:
        for spilling in own:
            spilling.tier.close()
        raise


def _resume_all(spillings: Sequence[Spilling], step: int) -> None:
    for spilling in spillings:
        spilling.resume_from(step)


def _check_one_run(runs: Sequence[Sequence[Mapping[str, str]]]) -> None:
    """Refuses records of different runs, where ranks have the files of each other or of an older copy."""
    found = dict(enumerate(run for of_process in runs for run in of_process))
    if told := differences(found):
        raise TierError(f"the records of the ranks are of different runs: {told}; resume from a checkpoint")


def _check_all(spillings: Sequence[Spilling | None]) -> None:
    for spilling in spillings:
        if spilling is None or spilling.resumed is None:
            raise TierError("a rank has all its stages on the device; resume from a checkpoint")
        _check_reason(spilling.resumed)


def _check_reason(committed: Commit) -> None:
    step = committed.step
    reason = rank_state(committed).reason
    if reason:
        raise TierError(f"no run can resume from the state of step {step}: {reason}; resume from a checkpoint")
