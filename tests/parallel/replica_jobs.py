"""What ranks run in the tests of replicas: functions that a rank can import by name."""

from typing import Any

import torch
from tests.parallel import tensor_jobs
from tests.parallel.test_sharded_optimizer import pipeline
from tests.stage.test_precision import float_model
from tests.stage.test_precision import pipeline as mixed_pipeline
from tests.testing.equality_models import make
from torch import Tensor, nn

from pipefit.errors import DataError
from pipefit.ir.op import Reduction
from pipefit.runtime.session import current

Told = tuple[list[float], dict[str, Tensor]]


def trained(model: str, options: dict[str, Any], steps: int = 4) -> Told:
    torch.manual_seed(0)
    layers, example = make(model)
    pipe = pipeline(layers, **options)
    return pipe.fit([example(9, step) for step in range(steps)]), pipe.state_dict()


def several(tasks: list[tuple[str, dict[str, Any]]]) -> list[Told]:
    return [trained(*task) for task in tasks]


def saved(place: str) -> Told:
    """Two steps, a checkpoint, two more."""
    torch.manual_seed(0)
    layers, example = make("tied ends")
    pipe = pipeline(layers, "1f1b, 2 × 2", "adam", shard="optimizer", stages=None)
    pipe.fit([example(9, step) for step in range(2)])
    pipe.save(place)
    return pipe.fit([example(9, 2), example(9, 3)]), pipe.state_dict()


def mixed(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Any]:
    model, example = float_model()
    pipe = mixed_pipeline(model, **options)
    losses = pipe.fit([example(8, step) for step in range(6)])
    scale = pipe.loss_scale
    return losses, pipe.state_dict(), scale.state() if scale else None


def hooked() -> list[tuple[int, int]]:
    """(bucket, parameters still without their gradient) at the start of each reduction of gradients of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 1024) if i % 2 == 0 else nn.Linear(1024, 512) for i in range(8)))
    pipe = pipeline(model, "data-parallel", loss=nn.functional.mse_loss, stages=None, microbatches=4)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    pipe.step(x, x)
    worker, transport = pipe.workers[0], pipe.engine.transports[0]
    seen: list[tuple[int, int]] = []
    start = transport.all_reduce

    def watched(members: Any, key: Any, tensors: list[Tensor]) -> Any:
        buckets = worker.buckets[0]
        if key[0] != Reduction.NORM:
            seen.append((key[-1], sum(waiting for waiting in buckets._waiting)))
        return start(members, key, tensors)

    transport.all_reduce = watched
    pipe.step(x, x)
    return seen


def unequal(what: str) -> str:
    """What each rank hears when its data are not those of the others."""
    torch.manual_seed(0)
    layers, example = make("plain")
    pipe = pipeline(layers, "data-parallel", stages=None)
    rank = current().rank
    batches = [example(9, step) for step in range(3)]
    if what == "fewer":
        batches = batches[: 3 - rank]
    elif what == "none":
        batches = [] if rank else batches
    else:
        batches = [example(9 - rank, 0)]
    try:
        pipe.step(*batches[0]) if what == "step" else pipe.fit(batches)
    except DataError as problem:
        return str(problem)
    return ""


def divided(place: str, shard: str) -> Told:
    """Two copies, each of two tensor-parallel processes, that share something; a checkpoint in the middle."""
    pipe = tensor_jobs.pipeline(tensor_jobs.model(), schedule="data-parallel", tensor=2, shard=shard)
    pipe.fit([tensor_jobs.batch(5, step) for step in range(2)])
    pipe.save(place)
    return pipe.fit([tensor_jobs.batch(5, 2)]), pipe.state_dict()


def wide_and_half() -> tuple[list[float], Any]:
    """Eight processes: two copies of two ranks of two processes, in half precision, with parts of states."""
    pipe = tensor_jobs.pipeline(
        tensor_jobs.model().float(),
        schedule="interleaved",
        chunks=2,
        replicas=2,
        microbatches=4,
        tensor=2,
        shard="optimizer",
        precision="bf16",
        loss_scale=2.0**126,
    )
    losses = pipe.fit([tensor_jobs.batch(8, step) for step in range(4)])
    scale = pipe.loss_scale
    return losses, scale.state() if scale else None
