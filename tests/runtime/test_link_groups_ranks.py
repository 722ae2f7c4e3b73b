"""Process groups of links: all ranks make the same ones in the same order, however many programs and pipelines come."""

import faulthandler
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current

pytestmark = pytest.mark.dist

STEPS = (2, 3, 2)


def train_by_turns() -> list[list[float]]:
    """Two pipelines in one run, each over programs of several lengths that all use the same links."""
    pipes = [_pipeline("pipedream"), _pipeline("1f1b")]
    return [pipe.fit([(torch.ones(6, 4), torch.zeros(6, 4))] * steps) for pipe in pipes for steps in STEPS]


def _pipeline(schedule: str) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        schedule=schedule,
        microbatches=1 if schedule == "pipedream" else 3,
    )


def test_a_second_pipeline_finds_its_groups_after_a_first_one_has_run_several_programs() -> None:
    """With each further program, ranks once made groups again for links that were not theirs.

    Torch names groups by how many a process has made, so ranks came to call one group by different names and waited
    for each other for ever.
    """
    losses = launch(train_by_turns, 3, threads=1, quiet=True, deadline_s=15)
    assert losses[0] == losses[1] == losses[2]
    assert all(len(told) == steps for told, steps in zip(losses[0], STEPS * 2, strict=True))


def policies() -> tuple[list[int], int]:
    """How Gloo's threads, and this one, are scheduled once a pipeline has run."""
    train_by_turns()
    threads = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
    return [os.sched_getscheduler(int(task.name)) for task in threads], os.sched_getscheduler(0)


@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
def test_threads_that_carry_messages_do_not_take_the_core_from_one_that_computes() -> None:
    for carrying, computing in launch(policies, 2, threads=1, quiet=True, deadline_s=15):
        assert carrying and set(carrying) == {os.SCHED_BATCH}
        assert computing == os.SCHED_OTHER


SHAPES: list[dict[str, Any]] = [
    {"schedule": "pipedream", "microbatches": 1, "replicas": (3, 1)},
    {"schedule": "1f1b", "microbatches": 6, "replicas": (1, 2, 1)},
    {"schedule": "pipedream-2bw", "microbatches": 4},
    {"schedule": "data-parallel", "microbatches": 4},
    {"schedule": "gpipe", "microbatches": 4, "replicas": 2, "shard": "optimizer"},
    {"schedule": "interleaved", "microbatches": 8, "replicas": 2, "chunks": 2, "clip_norm": 1.0},
    {"schedule": "pipedream", "microbatches": 1, "replicas": (2, 2)},
    {"schedule": "1f1b", "microbatches": 6, "replicas": (3, 1), "clip_norm": 1.0},
]


class Dawdling(nn.Module):
    """Passes its input on; now and then, at other moments on every rank, it sleeps on the way or on the way back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        self._sleep()
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda grad: self._sleep())
        return x

    def _sleep(self) -> None:
        if self._random.random() < 0.1:
            time.sleep(self._random.uniform(0, 0.01))


def train_at_random(seed: int, rounds: int) -> list[list[float]]:
    """Pipelines of all kinds in one run, in an order that is random but the same on all ranks."""
    faulthandler.dump_traceback_later(40)
    choose = random.Random(seed)
    told, kept = [], []
    for number in range(rounds):
        shape = choose.choice(SHAPES)
        if len(kept) < 3 or choose.random() < 0.5:
            kept.append(_dawdling(shape, 1000 * seed + 10 * number + current().rank))
        pipe, size = choose.choice(kept)
        steps = 6 * choose.randint(1, 3)  # every replica gets some
        samples = size + choose.randint(0, 1)
        told.append(pipe.fit([(torch.ones(samples, 4), torch.zeros(samples, 4))] * steps))
        if choose.random() < 0.3:
            told.append([float(pipe.evaluate([(torch.ones(samples, 4), torch.zeros(samples, 4))]))])
    faulthandler.cancel_dump_traceback_later()
    return told


def _dawdling(shape: dict[str, Any], seed: int) -> tuple[Pipeline, int]:
    torch.manual_seed(0)
    layers = [module for k in range(8) for module in (nn.Linear(4, 4), Dawdling(seed + 100 * k))]
    pipe = Pipeline(
        nn.Sequential(*layers),
        **grouped(loss=nn.functional.mse_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01), **shape),
    )
    return pipe, 2 * shape["microbatches"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_programs_and_delays_makes_four_ranks_stand_still(seed: int) -> None:
    """Four ranks on however few cores; replicas of all shapes, reductions and messages of both directions in flight."""
    losses = launch(train_at_random, 4, seed, 12, threads=1, quiet=True, deadline_s=20)
    assert all(told == losses[0] for told in losses)
