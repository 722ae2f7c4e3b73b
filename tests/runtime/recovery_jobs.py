"""Trainings in which a rank fails, for the tests of recovery; importable by name."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parallel import tensor_jobs
from tests.runtime import jobs
from torch import Tensor

from pipefit import Checkpoints
from pipefit.checkpoint import commit
from pipefit.checkpoint.commit import Part
from pipefit.checkpoint.memory import EVERY, Memory, recall
from pipefit.pipeline import request
from pipefit.pipeline.callbacks import Record
from pipefit.pipeline.loggers import csv_log
from pipefit.runtime.meeting import MEMORY
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
        losses += pipe.fit(half, len(half), callbacks=[Checkpoints(pipe, place, every=3)] if place else ())
    return losses, pipe.state_dict(), pipe.plan.num_processes


def train_and_die_while_saving(place: str) -> Result:
    """Rank 1 dies as it writes the sixth step in the background."""
    original = commit.write_tensors

    def dying(path: Path, *args: Any) -> Any:
        if current().start.restart == 0 and current().rank == 1 and "step-000006" in str(path):
            kill()
        return original(path, *args)

    commit.write_tensors = dying
    return train(place, {}, None)


def train_and_die_before_the_log(place: str) -> list[float]:
    """All ranks die in a callback of the third step, and its log follows."""
    pipe = jobs.pipeline(schedule="data-parallel")

    def die(record: Record) -> None:
        if record.step == 3 and not current().start.restart:
            kill()

    return pipe.fit(jobs.batches(5), callbacks=[die, csv_log(f"{place}/log.csv")])


def train_by_measured_plan(fault: tuple[str, int, int, int]) -> tuple[int, ...]:
    """The layers of the first stage of a plan that only the first start can measure."""
    if current().start.restart:
        request.agreed_profile = lambda *args: always_raise()
    _once(*fault)
    pipe = jobs.pipeline(stages="auto", example=jobs.batches(1)[0])
    pipe.fit(jobs.batches(3))
    return pipe.plan.partition.stages[0].layers


def always_die() -> None:
    pipe = jobs.pipeline()
    pipe.fit(jobs.batches(1))
    if current().rank == 1:
        kill()
    pipe.fit(jobs.batches(1))


def always_raise() -> None:
    raise RuntimeError("no such thing")


def train_without_rank(place: str, options: dict[str, Any], lost: int) -> tuple[Any, Any, Any]:
    """The last rank dies in a later step, and again whenever it is started."""
    if current().start.restart and current().rank == lost:
        kill()
    pipe = jobs.pipeline(**options)
    if current().start.restart == 0 and current().rank == lost:
        jobs._at(lost, 0, kill, 6)
    losses: list[float] = []
    data = jobs.batches(8)
    for half in (data[:4], data[4:]):
        losses += pipe.fit(half, callbacks=[Checkpoints(pipe, place, every=2)] if place else ())
    plan = pipe.plan
    layout = [len(stage.layers) for stage in plan.partition.stages], [len(ranks) for ranks in plan.placement.ranks]
    return losses, pipe.state_dict(), layout


def _on_machines(folders: list[str]) -> Path:
    """Makes this rank one of several machines, each with its own memory; returns its folder."""
    each = current().num_ranks // len(folders)
    machine, local = divmod(current().rank, each)
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each), MEMORY: folders[machine], EVERY: "1"}
    return Path(folders[machine])


def train_on_machines(folders: list[str], options: dict[str, Any]) -> None:
    """Four steps, after each of which every machine keeps what its ranks hold."""
    _on_machines(folders)
    jobs.pipeline(**options).fit(jobs.batches(4))


def recall_on_machines(
    folders: list[str], options: dict[str, Any]
) -> tuple[int | None, list[float], dict[str, Tensor]]:
    """Resumes from what the machines hold, and trains four more steps."""
    folder = _on_machines(folders) / "training-1"
    folder.mkdir(exist_ok=True)
    pipe = jobs.pipeline(**options)
    step = recall(pipe, folder, 1)
    return step, pipe.fit(jobs.batches(8)[4:]), pipe.state_dict()


class LateMemory(Memory):
    """Writes after another process has begun to."""

    def _write(self, parts: Sequence[Part], place: Path) -> None:
        while not list(place.glob("*.safetensors")):
            time.sleep(0.01)
        super()._write(parts, place)


def copy_in_pairs(folder: str) -> int | None:
    """The step that two processes with the same layers find in memory; one writes when the other has begun to."""
    pipe = tensor_jobs.pipeline(tensor_jobs.model(), tensor=2)
    pipe.step(*tensor_jobs.batch(4, 0))
    kind = LateMemory if current().rank == 1 else Memory
    kind(pipe, Path(folder), every=1).keep()
    return recall(pipe, Path(folder), 1)
