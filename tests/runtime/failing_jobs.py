"""Calls that fail on one rank, whose script catches the error and stays alive; importable by name."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.runtime import jobs
from torch import Tensor, nn

from pipefit.runtime.session import current


class Failing:
    """Raises on rank 1 at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 3 and current().rank == 1:
            raise OSError("no such file")


def _loss(check: Failing) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        check()
        return nn.functional.cross_entropy(output, target)

    return loss


def _optimizer(check: Failing) -> Callable[[Any], torch.optim.Optimizer]:
    class Checked(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            check()
            return super().step(closure)

    return lambda parameters: Checked(parameters, 0.1)


def _drawn(check: Failing) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in jobs.batches():
        check()
        yield batch


def fail(place: str, how: str, ranks: int) -> None:
    """Rank 1 fails, and waits in its own code until all others have an error; then all go on, which is refused.

    Each rank leaves its errors in a file, in lines.
    """
    rank = current().rank
    check = Failing()
    options: dict[str, Any] = {"scheduler": None}
    if how == "loss":
        options["loss"] = _loss(check)
    if how == "optimizer":
        options["optimizer"] = _optimizer(check)
    if how == "replica":
        options |= {"loss": _loss(check), "schedule": "data-parallel", "stages": 1}
    pipe = jobs.pipeline(**options)
    said: list[str] = []

    def attempt(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as problem:
            said.append(f"{type(problem).__name__}: {problem}")

    if how in ("data", "callback"):
        callbacks = [lambda record: check()] if how == "callback" else []
        attempt(lambda: pipe.fit(_drawn(check) if how == "data" else jobs.batches(6), callbacks=callbacks))
    elif how == "evaluate":
        attempt(lambda: pipe.evaluate(_drawn(check)))
    else:
        for batch in jobs.batches(3):
            attempt(pipe.step, *batch)
    Path(f"{place}-first-{rank}").touch()
    while rank == 1 and len(list(Path(place).parent.glob("*-first-*"))) < ranks:
        time.sleep(0.05)
    attempt(pipe.step, *jobs.batches()[0])
    attempt(pipe.evaluate, jobs.batches()[:1])
    Path(f"{place}-{rank}").write_text("\n".join(said))


def fail_alike(place: str) -> list[float]:
    """All ranks fail in the same call, before a pass, and go on."""
    pipe = jobs.pipeline(scheduler=None)
    few = [tensor[:1] for tensor in jobs.batches()[0]]
    losses = []
    for batch in (*jobs.batches()[:2], few, *jobs.batches()[2:]):
        try:
            losses.append(pipe.step(*batch))
        except ValueError as problem:
            assert "too few" in str(problem)
    try:
        pipe.load(place)
    except ValueError as problem:
        assert "there is none" not in str(problem)
    return losses


def train_on_other_values(place: str, what: str) -> None:
    """Rank 1 has other targets; both ranks catch the error and go on, and each leaves its errors in a file."""
    pipe = jobs.pipeline(scheduler=None)
    batches = jobs.batches(3)
    pipe.step(*batches[0])
    x, y = batches[1]
    said = []
    for target in ((y + current().rank) % 2, y):
        try:
            if what == "step":
                pipe.step(x, target)
            else:
                pipe.evaluate([(x, target)])
        except Exception as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    Path(f"{place}-{current().rank}").write_text("\n".join(said))


def step_on_another_batch() -> list[float]:
    """Rank 1 refuses its batch, and goes on to the next one."""
    pipe = jobs.pipeline(scheduler=None)
    batches = jobs.batches()
    if current().rank == 1:
        batches[1] = (batches[1][0][:1], batches[1][1][:1])
    losses = []
    for batch in batches:
        try:
            losses.append(pipe.step(*batch))
        except ValueError:
            continue
    return losses
