"""What the ranks of the tests of spilling do."""

import torch

from pipefit import Pipeline
from pipefit.models import build
from pipefit.train.spilled import Spilled

STEPS = 4


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def train(spill: dict | None, settings: dict) -> tuple[list[float], float]:
    """Losses, and what this rank has held at most."""
    torch.manual_seed(0)
    bundle = build("gpt", layers=8, hidden=64, heads=4, context=32, vocab=64, tied=False, dropout=0.1)
    pipe = Pipeline(
        bundle.layers, loss=bundle.loss, optimizer=adamw, schedule="breadth-first", microbatches=4, seed=3,
        spill=None if spill is None else Spilled(**spill), **settings,
    )  # fmt: skip
    losses = [pipe.step(*bundle.example(8, number)) for number in range(STEPS)]
    assert pipe.held_bytes is not None
    held = pipe.held_bytes
    pipe.close()
    return losses, held
