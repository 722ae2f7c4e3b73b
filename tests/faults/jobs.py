"""Functions that ranks run in these tests, importable by name."""

import itertools
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from tests.faults.shapes import batches, digest
from tests.runtime import jobs
from torch import Tensor, distributed, nn

from pipefit import Checkpoints
from pipefit.runtime.session import current
from pipefit.spec.host import usable_bytes


def listening() -> list[str]:
    """The addresses on which this rank's process listens once the ranks have exchanged data."""
    current()
    distributed.all_reduce(torch.ones(1))
    return sockets()


def sockets() -> list[str]:
    """The local addresses of this process's listening sockets, as hexadecimal digits of the kernel."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    own = {os.readlink(link) for link in links if link.is_symlink()}  # noqa: PTH115
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and fields[3] in ("0A", "07"):
                found.append(fields[1].partition(":")[0])
    return found


def train_by_a_jumping_clock(place: str, killed: bool) -> tuple[list[float], str]:
    """The wall clock jumps back by an hour whenever it is read; a rank may be killed once."""
    true, readings = time.time, itertools.count(1)
    time.time = lambda: true() - 3600 * next(readings)
    if killed and current().start.restart == 0:
        jobs._at(1, 0, lambda: os.kill(os.getpid(), 9), 4)
    pipe = jobs.pipeline()
    losses = pipe.fit(batches(), callbacks=[Checkpoints(pipe, place, every=2)])
    return losses, digest(pipe)


MEMORY_SITES = ("forward", "backward", "loss", "step")
_MORE_BYTES, _WANTED_BYTES = 64 << 20, 512 << 20


class _Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: str) -> Tensor:
        ctx.site = site
        eat(site == "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        eat(ctx.site == "backward")
        return gradient.clone(), None


class Hungry(nn.Module):
    """A layer that needs much memory for a moment."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return _Hungry.apply(x, self.site)


class HungryStep(torch.optim.SGD):
    """An optimizer whose step does."""

    def __init__(self, params: Any, is_hungry: bool) -> None:
        super().__init__(params, 0.1, momentum=0.9)
        self._is_hungry = is_hungry

    def step(self, closure: Any = None) -> Any:
        eat(self._is_hungry)
        return super().step(closure)


def eat(is_hungry: bool) -> None:
    if is_hungry:
        torch.empty(_WANTED_BYTES, dtype=torch.uint8)


def train_in_memory(place: str, site: str, limited: bool) -> tuple[int, list[float], str]:
    """Resumes from a folder, and trains; rank 1 may get a limit on its memory in the fourth step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), Hungry(site), nn.Linear(8, 3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        eat(site == "loss")
        return nn.functional.cross_entropy(output, target)

    def optimizer(params: Any) -> HungryStep:
        return HungryStep(params, site == "step" and current().rank == 1)

    pipe = jobs.pipeline(model=model, stages=[2, 3], loss=loss, optimizer=optimizer)
    if any(Path(place).glob("step-*")):
        pipe.load(place)

    def limit() -> None:
        # A thread writes the checkpoint while training goes on; this fault comes after it.
        while not (Path(place) / "step-000002").exists():
            time.sleep(0.01)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    if limited:
        jobs._at(1, 0, limit, 4)
    done = pipe.num_updates
    return done, pipe.fit(batches()[done:], callbacks=[Checkpoints(pipe, place, every=2)]), digest(pipe)


def train_in_a_group(place: str, members: str | None, starts: int) -> tuple[list[float], str]:
    """In the fourth step of the first starts rank 1 joins a control group whose memory is soon used up.

    Args:
        place: of the checkpoints.
        members: the file that lists the processes of the group; None: nobody joins.
        starts: number of these starts.
    """

    def join() -> None:
        while not (Path(place) / "step-000002").exists():
            time.sleep(0.01)
        Path(members).write_text(str(os.getpid()))
        torch.ones(_WANTED_BYTES, dtype=torch.uint8)

    pipe = jobs.pipeline()
    if members is not None and current().start.restart < starts:
        jobs._at(1, 0, join, 4 if current().start.restart == 0 else 1)
    return pipe.fit(batches(), callbacks=[Checkpoints(pipe, place, every=2)]), digest(pipe)


def usable_in_a_group(members: str) -> int:
    """The memory that a process may use which has joined a control group."""
    Path(members).write_text(str(os.getpid()))
    return usable_bytes()
