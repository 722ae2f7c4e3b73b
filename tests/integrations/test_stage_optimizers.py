"""States of a whole optimizer, as a checkpoint of the Trainer has them, are given to the optimizers of stages."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.integrations.stage_optimizers import StageOptimizers


class Head(nn.Module):
    """A layer that has the weight of another one."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1},
        {"stages": 2},
        {"stages": 4, "schedule": "interleaved", "parallelism": pf.Parallelism(chunks=2)},
        {"stages": 2, "parallelism": pf.Parallelism(replicas=2)},
    ],
)
def test_every_copy_of_a_weight_goes_on_with_states_of_its_own(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4, bias=False)
    plain = nn.Sequential(first, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Head(first)).double()
    whole = adamw(plain)
    batches = torch.randn(5, 2, 8, 4, dtype=torch.float64)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        whole.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        whole.step()
        return loss.item()

    for x, y in batches[:2]:
        step(x, y)
    model = copy.deepcopy(plain)
    loaded = adamw(model)
    loaded.load_state_dict(copy.deepcopy(whole.state_dict()))
    optimizers = StageOptimizers(model, loaded, None)
    pipe = pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=optimizers.of_stage, microbatches=4, **options)
    optimizers.give_states(pipe)
    for x, y in batches[2:]:
        assert pipe.step(x, y) == pytest.approx(step(x, y), rel=1e-12)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)
