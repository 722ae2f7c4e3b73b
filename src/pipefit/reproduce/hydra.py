"""Hydra's many models on few devices: twelve models of eight shards, on eight devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipefit.reproduce.entry import Bench, Picture
from pipefit.reproduce.measured import study_file
from pipefit.reproduce.steps import Python, Verb
from pipefit.study.picture import picture
from pipefit.study.simulation import TrialCost, one_by_one_s, simulate_study

_DEVICES = 8
_TRIALS = 12
_SHARDS = 8


def _trials(models: int) -> Sequence[TrialCost]:
    """Models of which a step visits each shard twice, but the last one once."""
    turns = (*[1.0] * (_SHARDS - 1), 3.0, *[2.0] * (_SHARDS - 1))
    return [TrialCost(turns, 10) for _ in range(models)]


def _study(run: Bench, policy: str, models: int = _TRIALS, devices: int = _DEVICES) -> Any:
    text = f"simulate_study({models} trials of 15 turns and 10 steps, {devices}, {policy!r})"
    return run(Python(text, lambda: simulate_study(_trials(models), devices, policy)))


def study_time(
    run: Bench, policy: str = "", microbatches: int = 0, models: int = _TRIALS, devices: int = _DEVICES
) -> float:
    """Time of all models: their shards take turns by a policy, or one model trains after the other over all devices.

    Args:
        run: runs steps.
        policy: the policy of the turns.
        microbatches: without a policy, of GPipe's schedule over all devices; 1: naive model parallelism.
        models: their number.
        devices: their number.
    """
    if policy:
        return float(_study(run, policy, models, devices).makespan_s)
    totals = [trial.total_s for trial in _trials(models)]
    return float(one_by_one_s(totals, [devices] * models, [microbatches] * models))


def study_energy(run: Bench, idle: float, policy: str = "", microbatches: int = 0) -> float:
    """Energy of all models, in that of a busy device per unit of time.

    Args:
        run: runs steps.
        idle: the power of an idle device, as a share of a busy one's.
        policy: as in `study_time`.
        microbatches: as in `study_time`.
    """
    busy = sum(trial.total_s for trial in _trials(_TRIALS))
    waiting = _DEVICES * study_time(run, policy, microbatches) - busy
    return busy + idle * waiting


def measured_makespan(run: Bench, policy: str) -> float:
    """Seconds of a study's measured turns under a policy."""
    return float(run(Verb("study", study_file()))["policies"][policy]["makespan_s"])


def sharp_picture(run: Bench) -> Picture:
    """The turns of all models on the devices."""
    found = _study(run, "lrtf")
    names = [f"model {number + 1}" for number in range(_TRIALS)]
    text = f"makespan {found.makespan_s:g}, lower bound {found.bound_s:g}: gap {found.gap:.1%}"
    return Picture("SHARP", lambda: picture(found, names, _DEVICES, "SHARP: 12 models on 8 devices"), text)
