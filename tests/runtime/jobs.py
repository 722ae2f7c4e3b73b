"""Functions that ranks run in these tests, importable by name."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.pipelines import grouped
from torch import Tensor, nn

from pipefit import Checkpoints, Pipeline
from pipefit.checkpoint import commit, export
from pipefit.errors import PipefitError
from pipefit.runtime.session import current
from pipefit.spec.options import Spilled

Batches = list[tuple[Tensor, Tensor]]


def model() -> nn.Sequential:
    """Five layers with dropout and batch norm, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def batches(count: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)
    ]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5)


def pipeline(**options: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": sgd,
        "scheduler": halving,
        "microbatches": 2,
        **options,
    }
    return Pipeline(settings.pop("model", None) or model(), **grouped(**settings))


def train_where_one_rank_makes_no_groups() -> None:
    """Rank 1 stays away when the groups of the links are made."""
    if current().rank == 1:
        torch.distributed.new_group = lambda *args, **kwargs: time.sleep(60)
    train()


def train(options: dict[str, Any] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a short training."""
    pipe = pipeline(**(options or {}))
    return pipe.fit(batches()), pipe.state_dict()


def train_and_save(place: str) -> list[float]:
    pipe = pipeline()
    losses = pipe.fit(batches()[:2])
    pipe.save(place, extra={"position": 2})
    return losses


def close_and_use() -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """The state before `close` and after it, and the output of the whole model in this process."""
    whole = model()
    pipe = pipeline(model=whole)
    pipe.fit(batches())
    before = pipe.state_dict()
    pipe.close()
    return before, {n: t.clone() for n, t in whole.state_dict().items()}, list(whole(batches()[0][0]).shape)


def close_spilled() -> list[bool]:
    """Whether each weight is without numbers in this process, after a spilled pipeline has been closed."""
    whole = model()
    pipe = pipeline(model=whole, spill=Spilled())
    pipe.fit(batches())
    pipe.close()
    return [parameter.is_meta for parameter in whole.parameters()]


def save_export_and_state(place: str) -> dict[str, Tensor]:
    """Two replicas of each of two stages."""
    pipe = pipeline(replicas=2, microbatches=4)
    pipe.fit(batches()[:2])
    pipe.save(f"{place}/run")
    export(pipe, f"{place}/model.safetensors")
    return pipe.state_dict()


def save_where_one_rank_cannot(place: str) -> str:
    """Messages of each rank when one cannot write."""

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    pipe = pipeline()
    if current().rank == 1:
        commit.write_tensors = full
    try:
        pipe.save(place)
    except PipefitError as problem:
        return str(problem)
    return ""


def train_another_program_on_one_rank() -> None:
    pipeline(microbatches=4 if current().rank else 2).fit(batches())


def load_and_train(place: str) -> tuple[list[float], dict[str, Tensor]]:
    pipe = pipeline()
    position = pipe.load(place).extra["position"]
    return pipe.fit(batches()[position:]), pipe.state_dict()


def _at(rank: int, index: int, act: Callable[[], None], pass_number: int = 2) -> None:
    """Does something on a rank just as it comes to an instruction."""
    progress = current().progress
    original = progress.at

    def at(here: int, waits: bool = False) -> None:
        original(here, waits)
        if here == index and progress.passes == pass_number:
            act()

    if current().rank == rank:
        progress.at = at


def program_lengths() -> list[int]:
    return [len(instructions) for instructions in pipeline().program.ranks]


def die_at(rank: int, index: int) -> None:
    _at(rank, index, lambda: os.kill(os.getpid(), signal.SIGKILL))
    pipeline().fit(batches())


def stop_at(rank: int, index: int) -> None:
    _at(rank, index, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    pipeline().fit(batches())


def dawdle_between_steps(rank: int) -> None:
    pipe = pipeline()
    for x, y in batches():
        pipe.step(x, y)
        if current().rank == rank:
            time.sleep(60)


def stop_rank_1_in(what: str, place: str) -> None:
    """Rank 1 stops where rank 0 waits for it."""
    pipe = pipeline()
    pipe.fit(batches()[:1])
    if what == "load":
        pipe.save(place)
    if current().rank:
        if what in ("save", "behind"):
            commit.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "evaluate":
            _at(1, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    if what in ("save", "load"):
        getattr(pipe, what)(place)
    elif what == "behind":
        pipe.save(place, wait=False)
        pipe.fit(batches()[:1])
    elif what == "evaluate":
        pipe.evaluate(batches()[:1])
    elif what != "leave":
        getattr(pipe, what)()


def stop_pipedream_at(rank: int, index: int) -> None:
    _at(rank, index, lambda: os.kill(os.getpid(), signal.SIGSTOP), pass_number=1)
    pipeline(schedule="pipedream").fit(batches(), 4)


def save_slowly(place: str) -> None:
    """One rank takes longer over its checkpoint than the deadline of a step."""
    original = commit.write_tensors

    def slow(*args: Any) -> Any:
        if current().rank == 1:
            time.sleep(2.5)
        return original(*args)

    commit.write_tensors = slow
    pipe = pipeline()
    pipe.fit(batches()[:1])
    pipe.save(place)


def save_behind(place: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Seven steps: the third one is saved by the clock of rank 0, and again where training waits for it.

    Those after it are saved too; on rank 1 the disk is full while the fourth one is written.
    """
    pipe, original, now = pipeline(**options), commit.write_tensors, [0.0]

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def clock() -> float:
        return now[0] if pipe.rank == 0 else 0.0

    def follow(record: Any) -> None:
        pipe.session.settle()
        now[0] = 30.0 * record.step
        if pipe.rank == 1:
            commit.write_tensors = full if record.step == 4 else original

    save = Checkpoints(pipe, f"{place}/behind", share=1.0, clock=clock)
    losses = pipe.fit(batches(7)[:3], callbacks=[follow, save])
    pipe.save(f"{place}/waited")
    losses += pipe.fit(batches(7)[3:], callbacks=[follow, Checkpoints(pipe, f"{place}/behind", 1, 0)])
    return losses, pipe.state_dict()


class Failing(nn.Module):
    """A layer that cannot run."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this layer is broken")


def train_broken_layer() -> None:
    pipeline(model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), Failing(), nn.Linear(8, 3)), stages=[2, 2]).fit(
        batches()
    )


def train_broken_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("no such class")

    pipeline(loss=loss).fit(batches())


def train_until_stopped(place: str, ready: str) -> None:
    """Trains for ever, or until it is asked to stop; then saves, as a user would."""
    pipe = pipeline()

    def endless() -> Any:
        while True:
            time.sleep(0.02)
            yield batches(1)[0]

    ended = []

    class Leaving:
        def step(self, record: Any) -> None:
            Path(ready).touch()

        def end(self, record: Any) -> None:
            ended.append(record.ended)
            pipe.save(place)

    losses = pipe.fit(endless(), callbacks=[Leaving()])
    assert ended == ["SIGTERM"] and len(losses) == pipe.num_updates
    pipe.fit(endless())
    raise AssertionError("a second fit goes on")


def block(ready: str) -> None:
    """Rank 1 waits for what rank 0 never sends."""
    torch.distributed.barrier()
    Path(f"{ready}-{current().rank}").write_text(str(os.getpid()))
    if current().rank:
        torch.distributed.recv(torch.zeros(1), 0)
    while True:
        time.sleep(100)


def threads():
    return torch.get_num_threads()


def environment(name: str) -> tuple[int, str | None]:
    return current().rank, os.environ.get(name)


def nothing() -> int:
    return current().rank
