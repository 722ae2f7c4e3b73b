"""Functions that ranks run in the tests of batches that differ, importable by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.runtime.jobs import Batches, pipeline
from torch import Tensor, nn

from pipefit.errors import PipefitError
from pipefit.runtime.session import current

OTHERS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "fewer": lambda x, y: (x[:6], y[:6]),
    "more": lambda x, y: (torch.cat([x, x]), torch.cat([y, y])),
    "type": lambda x, y: (x.double(), y),
    "one": lambda x, y: (x[:1], y[:1]),
    "values": lambda x, y: (x, (y + 1) % 4),
}


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def _model() -> nn.Sequential:
    """The first stages give what type they take, so that one that differs changes the size of a message."""
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Tanh(), Float(), *(nn.Linear(4, 4) for _ in range(4)))


def _batches(steps: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(steps)
    ]


def train(place: str, rank: int, steps: list[str], own: list[str], options: dict[str, Any]) -> None:
    """Trains on batches of some kinds; one rank has its own, and each leaves its error in a file.

    Args:
        place: of the files.
        rank: that has its own.
        steps: kind of each batch; "": as they are.
        own: of that rank.
        options: of the pipeline.
    """
    kinds = own if current().rank == rank else steps
    batches = [OTHERS[kind](x, y) if kind else (x, y) for kind, (x, y) in zip(kinds, _batches(len(kinds)), strict=True)]
    what = options.pop("what", "fit")
    pipe = pipeline(model=_model(), scheduler=None, **options)
    try:
        if what == "step":
            for batch in batches:
                pipe.step(*batch)
        elif what == "evaluate":
            pipe.evaluate(iter(batches))
        else:
            pipe.fit(iter(batches), steps=len(batches))
    except (PipefitError, RuntimeError) as problem:
        Path(f"{place}-{current().rank}").write_text(f"{type(problem).__name__}: {problem}")
        raise
