"""Trainings in which one rank has something else than the others; importable by name."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.faults import recovered_jobs
from tests.pipelines import grouped
from tests.runtime import jobs
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.runtime.collectives import receive, send
from pipefit.runtime.session import current


def usual_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def smoothed(amount: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: nn.functional.cross_entropy(output, target, label_smoothing=amount)


class Scaled(nn.Module):
    """A layer whose settings are neither a module nor a parameter."""

    def __init__(self, activation: Callable[[Tensor], Tensor], factor: float = 1.0) -> None:
        super().__init__()
        self.activation, self.factor = activation, factor
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.activation(self.linear(x))


def model(seed: int = 0, kind: type[nn.Module] = nn.ReLU, p: float = 0.3, **settings: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = Scaled(**({"activation": torch.relu} | settings))
    return nn.Sequential(nn.Linear(4, 8), kind(), nn.Dropout(p), middle, nn.LayerNorm(8), nn.Linear(8, 3))


def at_rate(rate: float, kind: Any = torch.optim.SGD) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=rate)


def frozen() -> nn.Sequential:
    found = model()
    found[0].weight.requires_grad_(False)
    return found


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "seed": lambda: {"model": model(seed=1)},
    "learning rate": lambda: {"optimizer": at_rate(0.2)},
    "optimizer": lambda: {"optimizer": at_rate(0.1, torch.optim.Adam)},
    "activation": lambda: {"model": model(kind=nn.GELU)},
    "function of a layer": lambda: {"model": model(activation=torch.tanh)},
    "number of a layer": lambda: {"model": model(factor=2.0)},
    "dropout": lambda: {"model": model(p=0.1)},
    "frozen weight": lambda: {"model": frozen()},
    "stages": lambda: {"stages": [2, 4]},
    "schedule": lambda: {"schedule": "gpipe"},
    "microbatches": lambda: {"microbatches": 4},
    "loss": lambda: {"loss": usual_loss},
    "smoothed loss": lambda: {"loss": smoothed(0.2)},
    "clip": lambda: {"clip_norm": 1.0},
    "seed of dropout": lambda: {"seed": 5},
    "scheduler": lambda: {"scheduler": jobs.halving},
    "precision": lambda: {"precision": "bf16"},
}


def usual() -> dict[str, Any]:
    loss, optimizer = smoothed(0.1), at_rate(0.1)
    return {"model": model(), "loss": loss, "optimizer": optimizer, "stages": [3, 3], "microbatches": 2}


def train(place: str, what: str, rank: int, ranks: int = 2, **options: Any) -> list[float]:
    """Trains; one rank has something else, and each leaves its error in a file."""
    settings = usual() | options
    if current().rank == rank:
        if what == "version of torch":
            torch.__version__ = "1.0"
        else:
            settings |= OTHERS[what]()
    try:
        return Pipeline(settings.pop("model"), **grouped(**settings)).fit(jobs.batches())
    except Exception as problem:
        Path(f"{place}-{current().rank}").write_text(f"{type(problem).__name__}: {problem}")
        raise


def train_with_own_things() -> list[float]:
    """Ranks differ in what may differ: a number and a truth value that a function takes from around, and an order."""
    rank = current().rank
    said, is_first = [], rank == 0
    words = {"a", "b", "c"} if rank else {"c", "b", "a"}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if is_first and rank == 0 and target.shape[0] and "a" in words:
            said.append(rank)
        return nn.functional.cross_entropy(output, target)

    settings = usual() | {"loss": loss}
    return Pipeline(settings.pop("model"), **grouped(**settings)).fit(jobs.batches())


def load_on_one_rank(place: str) -> None:
    """One rank begins later in its data."""
    pipe = jobs.pipeline()
    if current().rank:
        pipe.state.num_updates = 2
    try:
        pipe.fit(jobs.batches())
    except Exception as problem:
        Path(f"{place}-{current().rank}").write_text(f"{type(problem).__name__}: {problem}")
        raise


def spoil(
    place: str, how: str, options: dict[str, Any], rank: int = 1, name: str = "0.bias", bit: int = 0
) -> tuple[list[float], int]:
    """Trains two steps, changes one bit of a weight on one rank, and trains on or saves; the error goes to a file."""
    pipe = jobs.pipeline(scheduler=None, **options)
    losses = pipe.fit(jobs.batches()[:2])
    if current().rank == rank:
        named = {key: p for stage in pipe.workers[0].stages.values() for key, p in stage.named_parameters()}
        named[name].detach().reshape(-1).view(torch.int32)[3 % named[name].numel()] ^= torch.tensor(1 << bit).int()
    try:
        if how == "save":
            pipe.save(f"{place}-saved")
        losses += pipe.fit(jobs.batches()[2:])
    except Exception as problem:
        Path(f"{place}-{current().rank}").write_text(f"{type(problem).__name__}: {problem}")
        raise
    return losses, pipe.num_updates


def train_and_verify(tasks: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The steps of trainings whose replicas are compared after each step."""
    return [_verified(*task) for task in tasks]


def _verified(model: str, options: dict[str, Any]) -> int:
    pipe = recovered_jobs.pipeline(model, **options, verify_replicas=1)
    data = recovered_jobs.batches_of(model)
    return len(pipe.fit(data, len(data)))


def wait_in_what_all_do() -> float:
    """The number that rank 0 gets from rank 1, which is slow; rank 2 has nothing to do, and waits for the end."""
    session = current()
    number = torch.zeros(1)

    def work() -> None:
        if session.rank == 0:
            receive(session, number, 1)
        elif session.rank == 1:
            time.sleep(5)
            send(session, torch.ones(1), 0)

    session.unit(work)
    return float(number)
