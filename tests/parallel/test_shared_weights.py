"""Shared weights in the hands of a user: what is frozen and tied, few samples, changes between steps."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.errors import ModelError, PipefitError
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.schedules import Shape, generate
from pipefit.schedules.forward import forward_only
from pipefit.spec.options import Parallelism
from pipefit.verify import verify

pytestmark = pytest.mark.slow


def pipeline(shard: str, tied: bool = False, replicas: int = 2) -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    if tied:
        layers[0].weight.requires_grad_(False)
        layers[3].weight = layers[0].weight
    return Pipeline(
        nn.Sequential(*layers).double(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
        schedule="breadth-first",
        microbatches=2 * replicas,
        stages=[1] * 4,
        parallelism=Parallelism(ranks=replicas, replicas=replicas, chunks=4, shard=shard),
    )


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x.roll(1)


def test_a_frozen_weight_that_two_stages_of_a_rank_use_is_whole_for_both() -> None:
    whole, parts = pipeline("none", tied=True), pipeline("weights", tied=True)
    assert parts.fit([batch(8)] * 3) == whole.fit([batch(8)] * 3)
    for name, weight in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], weight), name


@pytest.mark.parametrize("replicas", [2, 3])
def test_batches_of_fewer_samples_than_copies_are_evaluated(replicas: int) -> None:
    whole, parts = pipeline("none", replicas=replicas), pipeline("weights", replicas=replicas)
    for samples in range(1, 2 * replicas + 2):
        assert parts.evaluate([batch(samples)]) == pytest.approx(whole.evaluate([batch(samples)]), rel=1e-12)


SHAPES: dict[str, Shape] = {
    "breadth-first": Shape(1, 4, 3, replicas=(2,), shard="weights"),
    "interleaved": Shape(2, 4, 2, replicas=(2,), shard="weights"),
    "gpipe": Shape(3, 6, replicas=(3, 1, 2), shard="weights"),
}


def gathers(made: Program, rank: int) -> list[int]:
    return [i.stage for i in made.ranks[rank] if i.op is Op.UNSHARD]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_every_copy_gathers_every_stage_once_in_a_forward(name: str, microbatches: int) -> None:
    made = forward_only(generate(name, SHAPES[name]).header, microbatches)
    shared = [stage for stage, ranks in enumerate(made.header.placement) if len(ranks) > 1]
    for rank in range(made.header.num_ranks):
        assert gathers(made, rank) == [stage for stage in made.header.stages_of(rank) if stage in shared]
    # It is no whole program: nothing is trained.
    assert {finding.rule for finding in verify(made).violations} <= {"complete", "messages", "collectives"}
    assert not [one for one in verify(made).violations if "unshard" in one.message]


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "initialised": nn.init.zeros_,
    "filled": lambda weight: weight.data.fill_(2.0),
    "replaced": lambda weight: setattr(weight, "data", torch.ones(8, 8, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_weight_that_would_be_lost_is_refused(change: str, tmp_path: Path) -> None:
    pipe, same = pipeline("weights"), pipeline("weights")
    weight = pipe.workers[0].owned[1][0].parameter
    CHANGES[change](weight)
    savings = (pipe.state_dict, partial(pipe.save, tmp_path), partial(pipe.save, tmp_path / "model.safetensors"))
    for saving in savings:
        with pytest.raises(PipefitError, match="a parameter was changed between two steps"):
            saving()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="a parameter was changed between two steps"):
        pipe.fit([batch(8)])
    assert pipe.fit([batch(8)]) == same.fit([batch(8)])
    CHANGES[change](weight)
    pipe.load_state_dict(same.state_dict())
    assert pipe.fit([batch(8)]) == same.fit([batch(8)])


def test_a_state_that_does_not_fit_a_stage_leaves_it_as_it_is() -> None:
    pipe = pipeline("weights")
    before = pipe.state_dict()
    state = {name: weight + 1 for name, weight in before.items() if name != "2.bias"}
    with pytest.raises(ModelError, match="bias"):
        pipe.load_state_dict(state)
    assert torch.equal(pipe.state_dict()["2.weight"], before["2.weight"])
