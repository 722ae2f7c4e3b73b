"""Sharing between replicas, up to the weights: equal numbers, a part of the memory, ordinary checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from tests.testing.equality_models import MODELS, make
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.errors import PlanError, ScheduleError
from pipefit.models.examples import mean_cross_entropy
from pipefit.spec.options import Parallelism
from pipefit.spec.plan import Shard

pytestmark = pytest.mark.slow

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": [x for x in p if x.dim() > 1], "weight_decay": 0.3}, {"params": [x for x in p if x.dim() < 2]}],
        0.01,
    ),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}
SHAPES: dict[str, dict[str, Any]] = {
    "data-parallel": {"schedule": "data-parallel", "stages": 3, "microbatches": 4},
    "1f1b, 2 × 2": {"schedule": "1f1b", "stages": 2, "replicas": 2, "microbatches": 4},
    "gpipe, 2-1": {"schedule": "gpipe", "stages": [5, 3], "replicas": (2, 1), "microbatches": 3},
    "interleaved, 2 × 2": {"schedule": "interleaved", "stages": 4, "chunks": 2, "replicas": 2, "microbatches": 4},
    "zb-h1, 2 × 2": {"schedule": "zb-h1", "stages": 2, "replicas": 2, "microbatches": 4},
    "pipedream, 2-1": {"schedule": "pipedream", "stages": [5, 3], "replicas": (2, 1), "microbatches": 1},
    "vertical sync": {"schedule": "pipedream-vertical-sync", "stages": 2, "replicas": 2, "microbatches": 1},
    "2bw": {"schedule": "pipedream-2bw", "stages": 2, "replicas": 2, "microbatches": 2},
}
ASYNCHRONOUS = ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"]


def pipeline(model: nn.Module, shape: str = "1f1b, 2 × 2", optimizer: str = "momentum", **more: Any) -> Pipeline:
    options = {"loss": mean_cross_entropy, "optimizer": OPTIMIZERS[optimizer], **SHAPES[shape], **more}
    return Pipeline(model, **grouped(**options))


def train(name: str, steps: int = 4, **options: Any) -> tuple[list[float], dict[str, Tensor], Pipeline]:
    torch.manual_seed(0)
    model, example = make(name)
    pipe = pipeline(model, **options)
    return pipe.fit([example(9, step) for step in range(steps)]), pipe.state_dict(), pipe


def assert_same(name: str, exact: bool = True, shard: str = "optimizer", **options: Any) -> None:
    losses, weights, _ = train(name, **options)
    got, mine, _ = train(name, shard=shard, **options)
    assert got == losses if exact else torch.allclose(torch.tensor(got), torch.tensor(losses), rtol=1e-12)
    for key, tensor in weights.items():
        assert torch.equal(mine[key], tensor) if exact else torch.allclose(mine[key], tensor, rtol=1e-11), key


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_are_those_of_whole_optimizers_to_the_bit(optimizer: str, shape: str) -> None:
    assert_same("plain", shape=shape, optimizer=optimizer)


SYNCHRONOUS = [name for name in SHAPES if SHAPES[name]["schedule"] not in ASYNCHRONOUS]


@pytest.mark.parametrize("shape", SYNCHRONOUS)
@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_shared_gradients_and_weights_change_no_number(shard: str, shape: str) -> None:
    # Sums of a part of the micro-batches each are added in another order: exact where a stage has one sum.
    exact = shape != "interleaved, 2 × 2"
    assert_same("plain", shape=shape, optimizer="adamw", shard=shard, exact=exact)


def test_frozen_weights_are_shared_too() -> None:
    def trained(shard: str) -> tuple[list[float], Pipeline]:
        torch.manual_seed(0)
        model, example = make("plain")
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        pipe = pipeline(model, shard=shard)
        return pipe.fit([example(9, step) for step in range(3)]), pipe

    whole, _ = trained("none")
    parts, pipe = trained("weights")
    assert parts == whole
    # Between two steps no weight is whole, whether it trains or not.
    assert all(bool(p.isnan().all()) for layer in pipe.layers for p in layer.module.parameters())
    assert not any(tensor.isnan().any() for tensor in pipe.state_dict().values())


@pytest.mark.parametrize("shard", ["gradients", "weights"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in SYNCHRONOUS])
def test_several_versions_of_weights_are_not_shared(shape: str, shard: str) -> None:
    with pytest.raises(ScheduleError, match="keeps several versions of the weights"):
        train("plain", shape=shape, shard=shard)


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_keeps_its_numbers(model: str) -> None:
    assert_same(model, shape="1f1b, 2 × 2", recompute=True)
    assert_same(model, shape="1f1b, 2 × 2", shard="weights", exact=False)


@pytest.mark.parametrize("shape", ["1f1b, 2 × 2", "2bw", "data-parallel"])
@pytest.mark.parametrize("model", ["tied ends", "batch norm"])
def test_clipping_counts_every_weight_once(model: str, shape: str) -> None:
    assert_same(model, exact=False, shape=shape, clip_norm=0.05)
    if shape in SYNCHRONOUS:
        assert_same(model, exact=False, shape=shape, clip_norm=0.05, shard="weights")


def state_bytes(pipe: Pipeline) -> list[int]:
    """Bytes of optimizer states of each rank, beside step counters."""
    return [
        sum(
            value.nbytes
            for optimizer in worker.optimizers.values()
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor) and key != "step"
        )
        for worker in pipe.workers
    ]


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_states_take_one_part_of_the_memory(copies: int) -> None:
    def run(shard: Shard) -> list[int]:
        pipe = Pipeline(
            nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48)),
            loss=nn.functional.mse_loss,
            optimizer=OPTIMIZERS["fused"],
            schedule="data-parallel",
            stages=copies,
            microbatches=copies,
            parallelism=Parallelism(shard=shard),
        )
        pipe.fit([(torch.randn(8, 48), torch.randn(8, 48))])
        return state_bytes(pipe)

    whole, parts = run("none"), run("optimizer")
    assert len(set(whole)) == 1
    assert sum(parts) == whole[0]
    assert max(parts) <= whole[0] / copies + 2 * 4 * 16 * copies


def test_optimizers_that_look_at_whole_weights_are_refused() -> None:
    with pytest.raises(PlanError, match="Adafactor is not known to"):
        Pipeline(
            make("plain")[0],
            **grouped(
                loss=mean_cross_entropy,
                optimizer=torch.optim.Adafactor,
                shard="optimizer",
                **SHAPES["data-parallel"],
            ),
        )


def test_one_rank_has_nothing_to_divide() -> None:
    with pytest.raises(PlanError, match=r"every stage is on one rank only \(d = 1\)"):
        Pipeline(
            make("plain")[0],
            loss=mean_cross_entropy,
            optimizer=OPTIMIZERS["sgd"],
            parallelism=Parallelism(shard="optimizer"),
        )


CHANGES = {
    "the same": ("1f1b, 2 × 2", "optimizer", "1f1b, 2 × 2", "optimizer"),
    "whole from parts": ("1f1b, 2 × 2", "optimizer", "1f1b, 2 × 2", "none"),
    "parts from whole": ("1f1b, 2 × 2", "none", "1f1b, 2 × 2", "optimizer"),
    "other parts": ("data-parallel", "optimizer", "interleaved, 2 × 2", "optimizer"),
    "weights from parts": ("data-parallel", "optimizer", "interleaved, 2 × 2", "weights"),
    "parts from weights": ("interleaved, 2 × 2", "weights", "1f1b, 2 × 2", "gradients"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "fused"])
def test_checkpoints_are_whole_whoever_writes_and_reads_them(change: str, optimizer: str, tmp_path: Path) -> None:
    before, parts_before, after, parts_after = CHANGES[change]
    torch.manual_seed(0)
    model, example = make("tied ends")
    pipe = pipeline(model, before, optimizer, shard=parts_before)
    pipe.fit([example(9, step) for step in range(2)])
    pipe.save(tmp_path)
    pipe.fit([example(9, 2), example(9, 3)])
    torch.manual_seed(1)
    other = pipeline(make("tied ends")[0], after, optimizer, shard=parts_after)
    other.load(tmp_path)
    other.fit([example(9, 2), example(9, 3)])
    for key, tensor in pipe.state_dict().items():
        assert torch.allclose(other.state_dict()[key], tensor, rtol=1e-12, atol=1e-14), key


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_closed_the_weights_are_memory_of_their_own_again(shard: str) -> None:
    _, before, pipe = train("plain", shard=shard)
    pipe.close()
    parameters = [p for layer in pipe.layers for p in layer.module.parameters()]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, before[name])
