"""Functions that ranks with a simulated GPU each run; a rank imports them by name."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from tests.faults.repaired_jobs import Fault, Trained, train
from tests.gpu import plain
from tests.gpu.rank_jobs import MODELS, Result
from tests.pipelines import grouped
from tests.runtime import jobs

from pipefit import Pipeline
from pipefit.errors import DataError
from pipefit.profiling.links import _time_pair
from pipefit.runtime.session import current


def trained(model: str, options: dict[str, Any]) -> Result:
    """Losses and weights of a rank after four steps on its own GPU."""
    make, data, loss = MODELS[model]
    settings = {"loss": loss, "optimizer": plain.sgd, "microbatches": 4}
    pipe = Pipeline(make(), **grouped(**settings | options))
    losses = pipe.fit(data())
    assert pipe.device == torch.device("cuda", dist.get_rank())
    assert torch.cuda.current_device() == dist.get_rank()
    assert all(peak > 0 for peak in pipe.report().peak_memory_bytes)
    for other in {0, 1} - {dist.get_rank()}:
        assert torch.cuda.max_memory_allocated(other) == 0
    return list(losses), {name: value.cpu() for name, value in pipe.state_dict().items()}


def all_trained(tasks: list[tuple[str, dict[str, Any]]]) -> list[Result]:
    """Several trainings, one after the other."""
    from tests.sham import backend

    found = [trained(*task) for task in tasks]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert set(backend.first_uses) == {"runtime/distributed.py _warm_up"}
    assert isinstance(dist.group.WORLD, backend.Sham)
    assert dist.get_backend_config() == "cpu:gloo,cuda:sham"
    return found


def places_of_first_uses(tasks: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """Where the first messages and reductions of some trainings and evaluations were."""
    from tests.sham import backend

    for model, options in tasks:
        make, data, loss = MODELS[model]
        pipe = Pipeline(make(), **grouped(**{"loss": loss, "optimizer": plain.sgd, "microbatches": 4, **options}))
        pipe.fit(data()[:2])
        pipe.evaluate(data()[:1])
        pipe.close()
    found = set(backend.first_uses)
    # The default group has sent nothing yet between GPUs: a measurement of links does, from GPU to GPU.
    rank = dist.get_rank()
    _time_pair(rank, 0, 1, (1 << 10,), 2, torch.device("cuda", rank))
    assert {"profiling/links.py send", "profiling/links.py receive"} & set(backend.first_uses)
    return found


def one_without_a_batch() -> None:
    """The second rank raises an error in its third step; the first waits for its messages in a kernel."""

    def data() -> Iterator[plain.Batch]:
        for step, batch in enumerate(plain.batches(6)):
            if step == 2 and dist.get_rank() == 1:
                raise DataError("rank 1 has no third batch")
            yield batch

    make, _, loss = MODELS["network"]
    pipe = Pipeline(make(), **grouped(loss=loss, optimizer=plain.sgd, microbatches=4))
    pipe.fit(data(), steps=6)


def resumed(place: str) -> list[float]:
    """Losses of a run that was saved in the middle and resumed by another pipeline."""
    make, _, loss = MODELS["network"]

    def pipeline() -> Pipeline:
        return Pipeline(make(), **grouped(loss=loss, optimizer=plain.adamw, microbatches=4))

    data = plain.batches(6)
    first = pipeline()
    losses = [first.step(x, y) for x, y in data[:3]]
    first.save(place)
    second = pipeline()
    second.load(place)
    return losses + [second.step(x, y) for x, y in data[3:]]


def repaired(place: str, options: dict[str, Any], faults: list[Fault]) -> Trained:
    """The results of a rank of a training that loses others; it keeps its GPU, also for another pipeline."""
    own = torch.device("cuda", dist.get_rank() if current().is_distributed else 0)
    found = train(place, options, faults)
    assert jobs.pipeline().device == own
    if current().is_distributed:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        # Shared weights are copied to memory before the commit, so their device has nothing left to do.
        if "shard" not in options:
            assert sys.modules["sham_driver"].waits["pipeline/training_loop.py _commit: synchronize"] >= 3
    return found


def race() -> str:
    """The message of a receive whose buffer is read without a wait for it."""
    Pipeline(plain.network(), **grouped(loss=MODELS["network"][2], optimizer=plain.sgd, microbatches=4))
    own = torch.zeros(3, device=f"cuda:{dist.get_rank()}")
    work = dist.all_reduce(own, async_op=True)
    try:
        own + 1
    except RuntimeError as problem:
        work.wait()
        return str(problem)
    return ""
