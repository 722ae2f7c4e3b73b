"""The first pass, in which shapes are still unknown to receivers, does not stand still."""

import time

import pytest
import torch
from torch import nn

from pipefit import Pipeline
from pipefit.ir.op import Op
from pipefit.runtime.launch import launch
from pipefit.spec.options import Parallelism

pytestmark = pytest.mark.dist


def train_at_once(schedule: str) -> list[float]:
    """Many micro-batches in flight both ways before any gradient has come back."""
    torch.manual_seed(0)
    chunks = 2 if schedule in ("breadth-first", "interleaved") else 1
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 * chunks)))
    pipe = Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        schedule=schedule,
        microbatches=24,
        parallelism=Parallelism(chunks=chunks),
    )
    return pipe.fit([(torch.ones(24, 4), torch.zeros(24, 4))] * 3)


@pytest.mark.parametrize("schedule", ["breadth-first", "interleaved", "gpipe", "pipedream-2bw"])
def test_ranks_do_not_wait_for_each_other_over_shapes_that_are_unknown(schedule):
    """Each rank once waited for its sends to be received, which the other posted only when it needed them."""
    losses = launch(train_at_once, 2, schedule, threads=1, quiet=True, deadline_s=15)
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0], "2BW is one update late"


class Dawdling(nn.Module):
    """A layer whose forward takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_FORWARD_S)
        return self.linear(x)


_FORWARD_S = 0.02


def longest_send_s() -> float:
    """Seconds of the longest send of rank 1 in a pass, in that of several where it was shortest."""
    pipe = Pipeline(
        nn.Sequential(*(Dawdling() for _ in range(4))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        schedule="breadth-first",
        microbatches=16,
        parallelism=Parallelism(chunks=2),
    )
    pipe.fit([(torch.ones(16, 4), torch.zeros(16, 4))] * 4)
    timeline = pipe.timeline(last=3)
    longest = [0.0] * timeline.num_repeats
    for event in timeline.events:
        if timeline.instruction(event).op is Op.SEND and event.rank == 1:
            longest[event.repeat] = max(longest[event.repeat], event.end_s - event.start_s)
    return min(longest)


def test_a_breadth_first_rank_goes_on_while_its_peer_is_busy_with_another_stage():
    """It once waited with its fifth message until the peer, done with its first stage, posted the receives."""
    assert min(launch(longest_send_s, 2, threads=1, quiet=True)) < 5 * _FORWARD_S
