"""Trainings that lose ranks more than once, for the trials of recovery; importable by name."""

import os
import signal
from typing import Any, NamedTuple

import torch
from tests.faults.shapes import batches, digest
from tests.runtime import jobs
from torch import nn

from pipefit import Checkpoints, Pipeline
from pipefit.checkpoint import restore
from pipefit.ir.op import Op
from pipefit.models import gpt
from pipefit.models.examples import mean_cross_entropy
from pipefit.runtime.session import current

LOADING = "loading"
"""In place of an operation: the rank dies while it reads the checkpoint from which the run resumes."""

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "pipedream": {"schedule": "pipedream", "scheduler": None},
    "zb-v": {"schedule": "zb-v", "chunks": 2, "stages": [1, 2, 2, 1]},
    "replicas": {"replicas": 2, "microbatches": 4},
    "adapters": {},
    "tensor": {"tensor": 2, "microbatches": 2},
    "tensor, two stages": {"tensor": 2, "microbatches": 2, "stages": 2},
}
RANKS = {shape: 4 if shape in ("replicas", "tensor, two stages") else 2 for shape in SHAPES}


class Death(NamedTuple):
    """A rank dies at the first instruction of a kind in a pass over the program, or while it loads.

    Attributes:
        start: the number of the start, 0 for the first.
        rank: the rank that dies.
        op: name of the operation, or `LOADING`.
        passes: number of the pass of this start, from 1.
    """

    start: int
    rank: int
    op: str
    passes: int = 1


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def pipeline(shape: str, **more: Any) -> Pipeline:
    """The training of a shape."""
    options = SHAPES[shape] | more
    if "tensor" in SHAPES[shape]:
        torch.manual_seed(0)
        model = gpt(layers=2, hidden=8, heads=4, vocab=12, context=4, dropout=0.2)
        return jobs.pipeline(model=model, loss=mean_cross_entropy, **options)
    if shape != "adapters":
        return jobs.pipeline(**options)
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(4, 8), nn.ReLU(), nn.Dropout(0.3), Adapted(8, 8), nn.ReLU(), Adapted(8, 3))
    return jobs.pipeline(model=model)


def batches_of(shape: str) -> jobs.Batches:
    """The batches of a shape."""
    if "tensor" not in SHAPES[shape]:
        return batches()
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(0, 12, (2, 4, 4), generator=generator) for _ in batches()]
    return [(x, y) for x, y in words]


def train(shape: str, place: str, deaths: list[Death]) -> tuple[list[str], str]:
    """The losses and the checksum of the weights of a training; ranks die as listed."""
    mine = [death for death in deaths if (death.start, death.rank) == (current().start.restart, current().rank)]
    for death in mine:
        if death.op == LOADING:
            restore.contents = _die
    pipe = pipeline(shape)
    for death in mine:
        if death.op != LOADING:
            own = pipe.program.ranks[death.rank // pipe.program.header.tensor]
            index = next(index for index, i in enumerate(own) if i.op is Op(death.op))
            jobs._at(death.rank, index, _die, death.passes)
    data = batches_of(shape)
    losses = pipe.fit(data, len(data), callbacks=[Checkpoints(pipe, place, every=2)])
    return [loss.hex() for loss in losses], digest(pipe)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
