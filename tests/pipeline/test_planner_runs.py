"""A plan of the planner is what a Pipeline trains, and the numbers are those of one process."""

import copy

import pytest
import torch
from torch import nn

from pipefit.pipeline.pipeline import Pipeline
from pipefit.planner import plan
from pipefit.profiling import profile_layers
from pipefit.spec import Topology

pytestmark = pytest.mark.slow

SGD = 0.1


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]


@pytest.mark.parametrize("wish", [{"method": "auto"}, {"depths": [2], "schedules": ["interleaved"]}, {"depths": [4]}])
def test_a_planned_pipeline_trains_like_one_process(wish):
    made = layers()
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    loss = nn.functional.mse_loss
    profile = profile_layers([*made], x[:2], loss, y[:2], repeats=3)
    found = plan(profile, Topology.local(4), global_batch=16, num_microbatches=8, **wish)
    assert found.placement.num_ranks == 4 and found.num_microbatches == 8

    alone = nn.Sequential(*copy.deepcopy(made))
    optimizer = torch.optim.SGD(alone.parameters(), SGD)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(alone(x), y)
        value.backward()
        optimizer.step()
        expected.append(value.item())

    pipe = Pipeline(made, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, SGD), plan=found)
    assert [pipe.step(x, y) for _ in range(2)] == pytest.approx(expected, rel=1e-5)
