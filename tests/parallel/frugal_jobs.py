"""What ranks run in the tests of the memory of shared weights: functions that a rank can import by name."""

import errno
import gc
from collections.abc import Callable, Collection
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipefit import Pipeline
from pipefit.checkpoint import commit
from pipefit.errors import PipefitError
from pipefit.spec.options import Parallelism

WIDTH, BLOCKS = 128, 4
BLOCK_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH)


class Held(NamedTuple):
    """Bytes of tensors that an action has made: the most at once, and those that are left."""

    most: float
    left: float


class Frugal(NamedTuple):
    """What one process has found: memory, losses after the checkpoint and after loading it, and the weights."""

    built: Held
    trained: Held
    saved: Held
    loaded: Held
    losses: list[float]
    again: list[float]
    weights: dict[str, Tensor]


def model() -> nn.Sequential:
    with torch.device("meta"):
        blocks = []
        for _ in range(BLOCKS):
            blocks.append(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)))
        return nn.Sequential(*blocks)


def pipeline(copies: int, shard: str = "weights") -> Pipeline:
    return Pipeline(
        model(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        schedule="breadth-first",
        microbatches=copies,
        stages=[1] * BLOCKS,
        parallelism=Parallelism(ranks=copies, replicas=copies, chunks=BLOCKS, shard=shard),
    )


def batches(first: int, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    found = []
    for number in range(first, first + count):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        found.append((x, x.roll(1)))
    return found


def held(action: Callable[[], Any], mapped: Collection[int] = ()) -> tuple[Any, Held]:
    """The result of an action, and the bytes of the tensors that it makes, as torch's allocator counts them.

    Args:
        action: the action.
        mapped: sizes of files, whose mapped pages count as memory for torch.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = action()
        gc.collect()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if abs(event.nbytes()) not in mapped]
    sums = list(accumulate(sizes, initial=0))
    return result, Held(max(sums), sums[-1])


def failed_save(pipe: Pipeline, place: str, wait: bool) -> str:
    """The message of a save while the disk of the first process is full."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.MonkeyPatch.context() as patch:
        if pipe.rank == 0:
            patch.setattr(commit, "write_tensors" if wait else "header", full)
        with pytest.raises(PipefitError) as caught:
            pipe.save(place, wait=wait)
    return str(caught.value)


def refused_save(pipe: Pipeline, place: str) -> str:
    """The message of a save after the last process alone has changed a weight of which it has a part; then undone."""
    before = pipe.state_dict()
    if pipe.rank == pipe.session.num_ranks - 1:
        nn.init.zeros_(pipe.workers[0].owned[1][0].parameter)
    with pytest.raises(PipefitError) as caught:
        pipe.save(place)
    pipe.load_state_dict(before)
    return str(caught.value)


def frugal(copies: int, place: str) -> Frugal:
    pipe, built = held(lambda: pipeline(copies))
    pipe.fit(batches(0))
    assert "the disk is full" in failed_save(pipe, place, wait=True)
    assert "no space" in failed_save(pipe, place, wait=False)
    assert f"rank {copies - 1}: a parameter was changed" in refused_save(pipe, place)
    assert not list(Path(place).glob("step-*"))
    _, saved = held(lambda: pipe.save(place))
    pipe.save(f"{place}/beside", wait=False)
    losses = pipe.fit(batches(2))
    other = pipeline(copies)
    pipe.load(f"{place}/beside")
    again, trained = held(lambda: pipe.fit(batches(2)))
    assert losses == again
    files = {path.stat().st_size for path in Path(place).rglob("*.safetensors")}
    _, loaded = held(lambda: other.load(place), files)
    return Frugal(built, trained, saved, loaded, losses, other.fit(batches(2)), pipe.state_dict())
