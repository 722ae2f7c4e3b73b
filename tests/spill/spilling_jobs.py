"""What the ranks of the tests of spilling do."""

import os
import signal
from pathlib import Path

import torch
from tests.pipelines import grouped

from pipefit import Pipeline
from pipefit.cli.ranks import train_rank
from pipefit.models import build
from pipefit.run.config import RunConfig
from pipefit.runtime.session import current
from pipefit.spec.options import Spilled
from pipefit.spill.tier_file import Commit, TierFile

STEPS = 4


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def train(spill: dict | None, settings: dict, plan: str = "") -> tuple[list[float], float, float]:
    """Losses, what this rank has held at most, and what the plan says that it would.

    Args:
        spill: arguments of `Spilled`.
        settings: of the pipeline.
        plan: where to leave the plan, if anywhere.
    """
    torch.manual_seed(0)
    bundle = build("gpt", layers=8, hidden=128, heads=4, context=64, vocab=64, tied=False, dropout=0.1)
    pipe = Pipeline(
        bundle.layers,
        **grouped(
            loss=bundle.loss,
            optimizer=adamw,
            seed=3,
            example=bundle.example(8, 0),
            spill=None if spill is None else Spilled(**spill),
            **{"microbatches": 4, **settings},
        ),
    )
    losses = [pipe.step(*bundle.example(8, number)) for number in range(STEPS)]
    assert pipe.held_bytes is not None
    held, claimed = pipe.held_bytes, pipe.plan.prediction.peak_bytes[pipe.rank] if pipe.plan.prediction else 0.0
    if plan and pipe.rank == 0:
        pipe.plan.save(Path(plan))
    pipe.close()
    return losses, held, claimed


def killed(config: RunConfig, commits: int) -> None:
    """A run whose second rank is killed while it writes what follows a commit."""
    true, done = TierFile.write, []

    def write(file: TierFile, data: memoryview, position: int) -> None:
        if len(done) == commits:
            true(file, data[: len(data) // 2], position)
            os.kill(os.getpid(), signal.SIGKILL)
        true(file, data, position)

    def commit(file: TierFile, what: Commit) -> None:
        committed(file, what)
        # Those that measure what a commit takes are of another file.
        done.extend([what] * (file.path.stem == "rank-1"))

    committed = TierFile.commit
    if current().rank == 1:
        TierFile.write, TierFile.commit = write, commit
    train_rank(config, True)
