"""Twelve trials of different lengths on two workers: the makespan of each policy, compared with the lower bound."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    policies: Sequence[str] = ("lrtf", "fifo", "whole-task"), scale: float = 1.0, workers: int = 2
) -> list[StudyRow]:
    """Runs the same trials under each policy, one study after the other.

    Args:
        policies: names.
        scale: of the trials' lengths; each has at least 2 steps.
        workers: processes of one thread.

    Raises:
        KeyboardInterrupt: a signal came; the study under way has stopped for it.
    """
    return [_measure(policy, scale, workers) for policy in policies]


def _measure(policy: str, scale: float, workers: int) -> StudyRow:
    trials = tuple(
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
    rows = study_policies(scale=steps / max(LENGTHS))
    print(f"{len(LENGTHS)} trials on 2 workers, the longest of {steps} steps\n")
    print(f"{'policy':<12} {'makespan':>10} {'bound':>10} {'× bound':>8} {'predicted':>10} {'moving state':>13}")
    for row in rows:
        predicted = f"{row.predicted_s:.2f} s" if row.predicted_s is not None else "–"
        print(
            f"{row.policy:<12} {row.makespan_s:>8.2f} s {row.bound_s:>8.2f} s {1 + row.gap:>8.3f} {predicted:>10} "
            f"{row.moved:>13.1%}"
        )
    alike = len({row.losses for row in rows}) == 1
    print(f"\nevery trial's last loss is {'the same to the bit' if alike else 'NOT THE SAME'} under every policy")
    return 0 if alike else 1
