"""Trainings in which a rank fails, for the tests of recovery; importable by name."""

import os
import signal
from typing import Any

from tests.runtime import jobs
from torch import Tensor

from pipefit import Checkpoints
from pipefit.runtime.session import current

Result = tuple[list[float], dict[str, Tensor], int]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _once(act: str, rank: int, index: int, passes: int) -> None:
    if current().start.restart == 0:
        jobs._at(rank, index, globals()[act], passes)


def train(place: str, options: dict[str, Any], fault: tuple[str, int, int, int] | None, count: int = 8) -> Result:
    """Trains twice over a half of the batches; in the first start a rank fails at an instruction of a pass."""
    if fault:
        _once(*fault)
    pipe = jobs.pipeline(**options)
    data = jobs.batches(count)
    losses: list[float] = []
    for half in (data[: count // 2], data[count // 2 :]):
        losses += pipe.fit(half, callbacks=[Checkpoints(pipe, place, every=3)] if place else ())
    return losses, pipe.state_dict(), pipe.plan.num_processes


def always_die() -> None:
    pipe = jobs.pipeline()
    pipe.fit(jobs.batches(1))
    if current().rank == 1:
        kill()
    pipe.fit(jobs.batches(1))


def always_raise() -> None:
    raise RuntimeError("no such thing")
