"""A step whose loss raises leaves no trace: the user may catch the error and go on with the next batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipefit as pf

CASES: dict[str, dict[str, Any]] = {
    "plain": {"parallelism": pf.Parallelism(ranks=2)},
    "replicas": {"parallelism": pf.Parallelism(ranks=4, replicas=2)},
    "sharded optimizer": {"parallelism": pf.Parallelism(ranks=4, replicas=2, shard="optimizer")},
    "shared gradients": {
        "schedule": "interleaved", "parallelism": pf.Parallelism(ranks=4, replicas=2, chunks=2, shard="gradients"),
    },
    "shared weights": {
        "schedule": "interleaved", "parallelism": pf.Parallelism(ranks=4, replicas=2, chunks=2, shard="weights"),
    },
    "zb-h1": {"schedule": "zb-h1", "parallelism": pf.Parallelism(ranks=2)},
}  # fmt: skip


class Faulty:
    """A loss that raises in the last micro-batch of a step, while it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.raises = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.raises and self.calls % 4 == 0:
            raise ValueError("no loss for this one")
        return nn.functional.mse_loss(output, target)


def trained(fails: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)]
    x, y, other = torch.randn(3, 16, 8, dtype=torch.float64)
    loss = Faulty()
    pipe = pf.Pipeline(
        nn.Sequential(*layers).double(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        **{"schedule": "1f1b", "microbatches": 4, **options},
    )
    losses = [float(pipe.step(x, y))]
    if fails:
        loss.raises = True
        with pytest.raises(ValueError, match="no loss for this one"):
            pipe.step(other, y)
        loss.raises = False
    losses += [float(pipe.step(x, y)) for _ in range(2)]
    return losses, pipe.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_failed_leaves_no_gradient_and_no_statistic(name: str) -> None:
    losses, weights = trained(False, CASES[name])
    got, mine = trained(True, CASES[name])
    assert got == losses
    assert all(torch.equal(mine[key], tensor) for key, tensor in weights.items())


def test_spilled_stages_that_failed_do_not_go_on() -> None:
    with pytest.raises(pf.PipefitError, match="or with gradients of spilled stages on the way"):
        trained(True, {"schedule": "spilled", "spill": pf.Spilled(), "stages": 4})


def test_a_pass_that_failed_after_an_update_does_not_go_on() -> None:
    loss = Faulty()
    loss.raises = True
    pipe = pf.Pipeline(
        [nn.Linear(8, 8) for _ in range(4)],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        schedule="pipedream",
        microbatches=1,
        parallelism=pf.Parallelism(ranks=2),
    )
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(6)]
    with pytest.raises(ValueError, match="no loss for this one"):
        pipe.fit(batches)
    with pytest.raises(pf.PipefitError, match="a step failed after some of its updates"):
        pipe.fit(batches)
