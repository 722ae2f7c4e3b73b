"""Replicas as processes: sums in buckets, sharded optimizers and mixed precision compute what one process computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel import replica_jobs as jobs
from tests.parallel import tensor_jobs
from tests.parallel.test_sharded_optimizer import pipeline
from tests.stage.test_precision import float_model
from tests.stage.test_precision import pipeline as mixed_pipeline
from tests.testing.equality_models import make

from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist

TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "buckets": ("batch norm", {"shape": "data-parallel", "stages": 2}),
    "an idle weight": ("a weight that nothing reaches", {"shape": "data-parallel", "stages": 2}),
    "sharded": ("batch norm", {"shape": "data-parallel", "stages": 2, "shard": "optimizer"}),
    "sharded adam": ("plain", {"shape": "data-parallel", "stages": 2, "shard": "optimizer", "optimizer": "adam"}),
    "sharded, clipped": ("plain", {"shape": "data-parallel", "stages": 2, "shard": "optimizer", "clip_norm": 0.05}),
    "weights": ("batch norm", {"shape": "data-parallel", "stages": 2, "shard": "weights", "optimizer": "adamw"}),
    "gradients": ("a weight that nothing reaches", {"shape": "data-parallel", "stages": 2, "shard": "gradients"}),
}
THREE: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded 2-1": ("tied ends", {"shape": "gpipe, 2-1", "shard": "optimizer"}),
    "weights 2-1": ("tied ends", {"shape": "gpipe, 2-1", "shard": "weights"}),
    "sharded pipedream 2-1": ("convolutions", {"shape": "pipedream, 2-1", "shard": "optimizer"}),
}


@pytest.fixture(scope="module")
def distributed() -> dict[str, list[jobs.Told]]:
    found = {}
    for num, tasks in ((2, TWO), (3, THREE)):
        alone = [(model, _of_processes(options)) for model, options in tasks.values()]
        parts = launch(jobs.several, num, alone, threads=1, quiet=True)
        found |= {name: [part[index] for part in parts] for index, name in enumerate(tasks)}
    return found


def _of_processes(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "stages": None} if isinstance(options.get("stages"), int) else options


@pytest.mark.parametrize("name", TWO | THREE)
def test_processes_compute_to_the_bit_what_ranks_in_one_process_compute(
    name: str, distributed: dict[str, list[jobs.Told]]
) -> None:
    losses, weights = jobs.trained(*(TWO | THREE)[name])
    for told in distributed[name]:
        assert told[0] == losses
        for key, tensor in weights.items():
            assert torch.equal(told[1][key], tensor), key


def test_reductions_start_while_the_backward_still_runs() -> None:
    for seen in launch(jobs.hooked, 2, threads=1, quiet=True):
        assert [number for number, _ in seen] == list(range(len(seen)))
        assert len(seen) > 1
        assert seen[0][1] >= 8
        assert seen[-1][1] == 0


def test_what_four_processes_save_in_parts_one_process_reads_whole(tmp_path: Path) -> None:
    (losses, weights), *_ = launch(jobs.saved, 4, str(tmp_path), threads=1, quiet=True)
    layers, example = make("tied ends")
    pipe = pipeline(layers, "1f1b, 2 × 2", "adam")
    pipe.load(tmp_path)
    assert torch.allclose(torch.tensor(pipe.fit([example(9, 2), example(9, 3)])), torch.tensor(losses), rtol=1e-12)
    for key, tensor in pipe.state_dict().items():
        assert torch.allclose(weights[key], tensor, rtol=1e-10), key


MIXED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "stages": [3, 3], "recompute": True},
    "fp16, skipping": {"precision": "fp16", "stages": [3, 3], "loss_scale": 2.0**22},
}


@pytest.mark.parametrize("name", MIXED)
def test_half_precision_over_processes_is_that_of_one_process(name: str) -> None:
    parts = launch(jobs.mixed, 2, MIXED[name], threads=1, quiet=True)
    model, example = float_model()
    pipe = mixed_pipeline(model, **MIXED[name])
    losses = pipe.fit([example(8, step) for step in range(6)])
    scale = pipe.loss_scale
    for got, weights, state in parts:
        assert got == losses
        assert state == (scale.state() if scale else None)
        for key, tensor in pipe.state_dict().items():
            assert torch.equal(weights[key], tensor), key
    assert scale is None or scale.skipped > 0


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("fewer", "batches: rank 0 has 3, rank 1 has 2"),
        ("none", "batches: rank 0 has 3, rank 1 has 0"),
        ("sizes", "shapes of the first batch: rank 0 has float64[9, 4], int64[9], rank 1 has float64[8, 4], int64[8]"),
        ("step", "shapes of the first batch: rank 0 has float64[9, 4], int64[9], rank 1 has float64[8, 4], int64[8]"),
    ],
)
def test_unequal_data_are_told_on_every_rank_before_the_first_step(what: str, told: str) -> None:
    heard = launch(jobs.unequal, 2, what, threads=1, quiet=True)
    assert heard[0] == heard[1]
    assert heard[0].startswith(told)
    assert "DistributedSampler" in heard[0]


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_what_is_shared_goes_with_parts_of_layers(shard: str, tmp_path: Path) -> None:
    """The model has one weight under two names of a stage, which the checkpoint holds once."""
    (losses, weights), *_ = launch(jobs.divided, 4, str(tmp_path), shard, threads=1, quiet=True)
    pipe = tensor_jobs.pipeline(tensor_jobs.model(), stages=2)
    pipe.fit([tensor_jobs.batch(5, step) for step in range(2)])
    again = tensor_jobs.pipeline(tensor_jobs.model(), stages=2)
    again.load(tmp_path)
    for alone in (pipe, again):
        assert alone.fit([tensor_jobs.batch(5, 2)]) == pytest.approx(losses, rel=1e-9)
        for key, tensor in alone.state_dict().items():
            assert torch.allclose(weights[key], tensor, rtol=1e-7, atol=1e-10), key


@pytest.mark.slow
def test_eight_processes_do_it_all_at_once() -> None:
    """The scale begins far too large for anything: the first updates are skipped, by all."""
    found = launch(jobs.wide_and_half, 8, threads=1, quiet=True)
    assert all(told == found[0] for told in found)
    losses, scale = found[0]
    assert scale["skipped"] == 4
    assert scale["scale"] == 2.0**122
    pipe = tensor_jobs.pipeline(
        tensor_jobs.model().float(), microbatches=4, precision="bf16", stages=4, chunks=2, schedule="interleaved"
    )
    assert losses[0] == pytest.approx(pipe.fit([tensor_jobs.batch(8, 0)])[0], rel=1e-2)
