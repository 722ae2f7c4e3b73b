"""The device of a process: which GPU it is, what its memory is, and that nothing else of the machine is used."""

import pytest
import torch
import torch.distributed as dist
from tests.gpu import plain
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline
from pipefit.errors import PipefitError
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.workload import Workload
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.stage.device import process_device, usable_device
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.gpu


def pipeline(device: str | None) -> Pipeline:
    options = grouped(optimizer=plain.sgd, stages=2, microbatches=2, device=device)
    return Pipeline(plain.network(), loss=nn.functional.cross_entropy, **options)


@pytest.mark.parametrize("name", [None, "cuda"])
def test_a_gpu_without_a_number_is_that_of_the_process(name: str | None) -> None:
    assert pipeline(name).device == torch.device("cuda", 0)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count()
    monkeypatch.setenv("LOCAL_RANK", str(count))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count + 1))
    expected = f"{count + 1} ranks were started on this machine, where torch sees {count}; start {count}, or"
    with pytest.raises(PipefitError, match=expected):
        process_device()
    with pytest.raises(PipefitError, match=expected):
        usable_device("cuda")


def test_a_training_on_the_cpu_reports_memory_of_the_process() -> None:
    torch.empty(1 << 20, device="cuda:0")
    pipe = pipeline("cpu")
    pipe.step(*plain.batches()[0])
    assert pipe.report().peak_memory_bytes[0] > 50e6, "the resident set, not what a GPU holds"


def test_what_was_on_the_gpu_before_is_not_the_peak_of_a_training() -> None:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    pipe = pipeline("cuda")
    pipe.step(*plain.batches()[0])
    assert 0 < pipe.report().peak_memory_bytes[0] < 1 << 29


def test_layers_of_a_model_on_the_host_are_measured_on_the_gpu() -> None:
    layers = named_layers(plain.network())
    work = Workload(layers, nn.functional.cross_entropy, plain.sgd, torch.device("cuda:0"), plain.batches()[0])
    profile = agreed_profile(work, [2], current(), repeats=3, warmup=1)
    assert profile.device.startswith("cuda: ")
    assert all(p.device.type == "cpu" for layer in layers for p in layer.module.parameters())


def with_nccl() -> tuple[list[str], list[float]]:
    """The backends of a run of one rank, and its losses."""
    pipe = pipeline(None)
    losses = pipe.fit(plain.batches())
    total = torch.ones(3, device="cuda:0")
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
    return sorted(dist.get_backend_config().split(",")), list(losses)


@pytest.mark.dist
def test_one_rank_with_nccl_begins_trains_and_ends() -> None:
    [(backends, losses)] = launch(with_nccl, 1, threads=1, quiet=True)
    assert backends == ["cpu:gloo", "cuda:nccl"]
    assert losses == pytest.approx(plain.trained(plain.network(), plain.batches())[0], rel=plain.TOLERANCE)
