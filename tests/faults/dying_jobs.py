"""Trainings with copies of stages whose ranks die at a random moment, for the trials of deaths; importable by name."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.faults.shapes import batches
from tests.parallel import tensor_jobs
from tests.runtime import jobs
from torch import Tensor

from pipefit import Checkpoints
from pipefit.checkpoint import commit
from pipefit.models.examples import mean_cross_entropy
from pipefit.runtime.meeting import MEMORY
from pipefit.runtime.session import current

COPIES: dict[str, Any] = {"replicas": 2, "microbatches": 4}
CHUNKS: dict[str, Any] = {**COPIES, "chunks": 2, "stages": [1, 2, 2, 1]}
SHAPES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive", **COPIES},
    "data-parallel": {"schedule": "data-parallel", "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "recompute": True, **COPIES},
    "1f1b": COPIES,
    "interleaved": {"schedule": "interleaved", **CHUNKS},
    "breadth-first": {"schedule": "breadth-first", **CHUNKS},
    "zb-h1": {"schedule": "zb-h1", **COPIES},
    "zb-h2": {"schedule": "zb-h2", "clip_norm": 0.05, **COPIES},
    "zb-v": {"schedule": "zb-v", **CHUNKS},
    "copies 2-1": {"replicas": (2, 1), "microbatches": 4, "stages": 2},
    "copies 1-2": {"replicas": (1, 2), "microbatches": 4, "stages": 2, "clip_norm": 0.05},
}
"""Every synchronous schedule with copies, and copies of one stage; all with dropout, batch norm and momentum."""

SHARED: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer", **COPIES},
    "gradients": {"shard": "gradients", "schedule": "data-parallel", "microbatches": 4},
    "weights": {"shard": "weights", "clip_norm": 0.05, **COPIES},
    "weights 2-1": {"shard": "weights", "replicas": (2, 1), "microbatches": 4, "stages": 2},
    "two": {"shard": "optimizer", "schedule": "data-parallel", "microbatches": 4},
}
"""Schedules and placements whose copies share gradients, weights or optimizer states of a stage."""

TENSOR: dict[str, dict[str, Any]] = {
    "tensor": {"schedule": "data-parallel", "tensor": 2, "microbatches": 4},
    "tensor 1f1b": {"stages": 2, "tensor": 2, "clip_norm": 0.05, **COPIES},
    "tensor 2-1": {"stages": 2, "tensor": 2, "replicas": (2, 1), "microbatches": 4},
    "tensor optimizer": {"schedule": "data-parallel", "tensor": 2, "shard": "optimizer", "microbatches": 4},
    "tensor gradients 1f1b": {"stages": 2, "tensor": 2, "shard": "gradients", **COPIES},
    "tensor weights 1f1b": {"stages": 2, "tensor": 2, "shard": "weights", "clip_norm": 0.05, **COPIES},
}
"""Copies of a GPT whose layers two processes share, and perhaps copies weights or states; with dropout."""

THREE = ("data-parallel", "copies 2-1", "copies 1-2", "gradients", "weights 2-1")
RANKS = {shape: 3 if shape in THREE else 4 for shape in (*SHAPES, *SHARED)}
RANKS |= {"two": 2}
RANKS |= {"tensor": 4, "tensor 1f1b": 8, "tensor 2-1": 6}
RANKS |= {"tensor optimizer": 4, "tensor gradients 1f1b": 8, "tensor weights 1f1b": 8}


class Death(NamedTuple):
    """The moment at which a rank dies in the first start of a run.

    Attributes:
        rank: that dies.
        instructions: it has come to as many; None: a clock decides.
        seconds: after it has made its pipeline.
        in_group: it dies when the ranks make a process group for their first checkpoint, before it joins.
    """

    rank: int
    instructions: int | None = None
    seconds: float = 0.0
    in_group: bool = False


class Trained(NamedTuple):
    """The results of a rank.

    Attributes:
        losses: of all steps, and of an evaluation.
        weights: of the whole model, with its buffers.
        instructions: that the rank came to.
        seconds: of training and evaluation.
        sockets: open ones.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    instructions: int
    seconds: float
    sockets: int


def train(shape: str, place: str, deaths: list[Death]) -> Trained:
    """Trains in double precision, evaluates, and ends; ranks die as listed."""
    Path(place, f"{os.getpid()}.pid").write_text(os.environ[MEMORY])
    if shape in TENSOR:
        pipe = jobs.pipeline(model=tensor_jobs.model(dropout=0.2), loss=mean_cross_entropy, **TENSOR[shape])
        data = [tensor_jobs.batch(8, step) for step in range(6)]
    else:
        pipe = jobs.pipeline(model=jobs.model().double(), **(SHAPES | SHARED)[shape])
        data = [(x.double(), y) for x, y in batches()]
    count = _counted([death for death in deaths if death.rank == current().rank and not current().start.restart])
    begun = time.perf_counter()
    losses = pipe.fit(data, len(data), callbacks=[Checkpoints(pipe, f"{place}/checkpoints", every=2)])
    losses.append(pipe.evaluate(data[:1]))
    seconds = time.perf_counter() - begun
    weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return Trained(losses, weights, len(count), seconds, num_sockets())


def num_sockets() -> int:
    """Open sockets of this process: those of groups that were left are closed, by threads."""
    for thread in threading.enumerate():
        if thread.name in ("pipefit-old-groups", "pipefit-background"):
            thread.join(60)
    links = Path("/proc/self/fd").iterdir()
    return sum(str(link.readlink()).startswith("socket:") for link in links if link.is_symlink())


def _counted(deaths: list[Death]) -> list[None]:
    """A list that grows with every instruction that this rank comes to, until it dies."""
    count: list[None] = []
    progress = current().progress
    original = progress.at

    def at(here: int, waits: bool = False) -> None:
        original(here, waits)
        count.append(None)
        if any(death.instructions == len(count) for death in deaths):
            _die()

    progress.at = at
    for death in deaths:
        if death.in_group:
            commit.dist = SimpleNamespace(new_group=lambda **_: _die())
        elif death.instructions is None:
            timer = threading.Timer(death.seconds, _die)
            timer.daemon = True
            timer.start()
    return count


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
