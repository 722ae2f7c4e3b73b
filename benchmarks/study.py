"""Twelve trials of different lengths on two workers: the makespan of each policy, compared with the lower bound.

The baselines run too: any trial at random, whole trials, and one trial after the other over both workers, as a pipeline
(gpipe) and as plain model parallelism (naive).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pipefit import Parallelism, Pipeline
from pipefit.run.sources import bundle_of
from pipefit.runtime.launch import launch
from pipefit.study.execute.admission import recipe_of
from pipefit.study.execute.study_run import StudyRun
from pipefit.study.trial import StudySpec, Trial

LENGTHS = (16, 16, 20, 24, 28, 32, 36, 40, 48, 56, 72, 168)
"""Steps of the trials, the longest one last, as it happens when nobody has thought about it."""

OPTIONS = {"layers": 4, "hidden": 128, "heads": 4, "context": 128}
"""GPT of 4 blocks × 128, in three shards."""


class StudyRow(NamedTuple):
    """A policy, run.

    Attributes:
        policy: its name.
        makespan_s: measured, from the first turn to the last.
        bound_s: max(longest trial, total / workers) of the same run's turns.
        gap: makespan over bound, minus one.
        predicted_s: the makespan on paper after the first turns; None where trials began too late.
        moved: share of the turns' time that state took to the tier and back.
        losses: the last of each trial, which must not depend on the policy.
    """

    policy: str
    makespan_s: float
    bound_s: float
    gap: float
    predicted_s: float | None
    moved: float
    losses: tuple[float | None, ...]


def study_policies(
    policies: Sequence[str] = ("lrtf", "fifo", "random", "whole-task"), scale: float = 1.0, workers: int = 2
) -> list[StudyRow]:
    """Runs the same trials under each policy, one study after the other.

    Args:
        policies: names.
        scale: of the trials' lengths; each has at least 2 steps.
        workers: processes of one thread.

    Raises:
        KeyboardInterrupt: a signal came; the study under way has stopped for it.
    """
    return [_measure(policy, _trials(scale), workers) for policy in policies]


def one_after_another(schedule: str, scale: float = 1.0, workers: int = 2) -> StudyRow:
    """Trains the same trials one after the other, each over all workers as a pipeline of a schedule."""
    seconds, losses = launch(_train_all, workers, schedule, _trials(scale), threads=1, quiet=True)[0]
    return StudyRow(schedule, sum(seconds), 0.0, 0.0, None, 0.0, losses)


def _train_all(schedule: str, trials: Sequence[Trial]) -> tuple[list[float], tuple[float, ...]]:
    """Seconds of each trial, with its building, and its last loss."""
    seconds, losses = [], []
    for trial in trials:
        start_s = time.perf_counter()
        recipe = recipe_of(trial)
        torch.manual_seed(trial.seed)
        pipe = Pipeline(
            bundle_of("gpt", dict(trial.options), trial.seed, False).layers,
            loss=recipe.training.loss,
            optimizer=recipe.training.optimizer,
            schedule=schedule,
            microbatches=trial.microbatches,
            parallelism=Parallelism(device="cpu"),
        )
        last = pipe.fit([recipe.batch_at(step) for step in range(trial.steps)])[-1]
        seconds.append(time.perf_counter() - start_s)
        losses.append(last)
    return seconds, tuple(losses)


def _trials(scale: float) -> tuple[Trial, ...]:
    return tuple(
        Trial(
            name=f"steps-{number:02d}",
            options=OPTIONS,
            data=("synthetic",),
            batch=8,
            microbatches=2,
            steps=max(2, round(scale * steps)),
            lr=1e-3,
            seed=number,
            shards=3,
        )
        for number, steps in enumerate(LENGTHS)
    )


def _measure(policy: str, trials: tuple[Trial, ...], workers: int) -> StudyRow:
    with tempfile.TemporaryDirectory(prefix="pipefit-bench-") as folder:
        spec = StudySpec(trials, workers, policy, threads=1, output=str(Path(folder) / policy), name=policy)
        result = StudyRun(spec, forked=False).run()
    if result.interrupted:
        raise KeyboardInterrupt  # half a study is no measurement
    losses = tuple(row.last_loss for row in result.trials)
    moved = sum(row.moved_s for row in result.trials) / max(sum(row.busy_s for row in result.trials), 1e-9)
    return StudyRow(policy, result.makespan_s, result.bound_s, result.gap, result.predicted_s, moved, losses)


def main(steps: int = max(LENGTHS)) -> int:
    """Prints each policy's makespan and the bound; exit code 1: losses depend on the policy.

    Args:
        steps: of the longest trial.
    """
    scale = steps / max(LENGTHS)
    rows = study_policies(scale=scale)
    baselines = [one_after_another(schedule, scale) for schedule in ("gpipe", "naive")]
    print(f"{len(LENGTHS)} trials on 2 workers, the longest of {steps} steps\n")
    print(f"{'policy':<12} {'makespan':>10} {'bound':>10} {'× bound':>8} {'predicted':>10} {'moving state':>13}")
    bound_s = rows[0].bound_s
    for row in baselines:
        print(f"{row.policy:<12} {row.makespan_s:>8.2f} s {bound_s:>8.2f} s {row.makespan_s / bound_s:>8.3f}")
    for row in rows:
        predicted = f"{row.predicted_s:.2f} s" if row.predicted_s is not None else "–"
        print(
            f"{row.policy:<12} {row.makespan_s:>8.2f} s {row.bound_s:>8.2f} s {1 + row.gap:>8.3f} {predicted:>10} "
            f"{row.moved:>13.1%}"
        )
    alike = len({row.losses for row in rows}) == 1
    print(f"\nevery trial's last loss is {'the same to the bit' if alike else 'NOT THE SAME'} under every policy")
    return 0 if alike else 1
