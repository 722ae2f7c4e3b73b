"""Functions that the ranks of tests on one GPU run; a rank imports them by name."""

from typing import Any

import torch
import torch.distributed as dist
from tests.faults.repaired_jobs import Fault, Trained, train
from tests.gpu import plain, staged_backend
from tests.parallel import tensor_jobs
from tests.pipelines import grouped
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.models.examples import mean_cross_entropy

DEVICE = "cuda:0"
Result = tuple[list[float], dict[str, Tensor]]

MODELS = {
    "network": (plain.network, plain.batches, nn.functional.cross_entropy),
    "tied": (plain.tied, plain.sentences, nn.functional.cross_entropy),
    "gpt": (tensor_jobs.model, lambda: [tensor_jobs.batch(12, step) for step in range(4)], mean_cross_entropy),
}


def trained(model: str, options: dict[str, Any]) -> Result:
    """Losses and weights of a rank after four steps."""
    make, data, loss = MODELS[model]
    settings = {"loss": loss, "optimizer": plain.sgd, "microbatches": 4, "device": DEVICE}
    pipe = Pipeline(make(), **grouped(**settings | options))
    losses = pipe.fit(data())
    return list(losses), {name: value.cpu() for name, value in pipe.state_dict().items()}


def all_trained(tasks: list[tuple[str, dict[str, Any]]]) -> list[Result]:
    """Several trainings, one after the other."""
    assert isinstance(dist.group.WORLD, staged_backend.Staged) or not dist.is_initialized()
    found = [trained(*task) for task in tasks]
    assert torch.cuda.current_device() == 0
    return found


def repaired(place: str, options: dict[str, Any], faults: list[Fault]) -> Trained:
    """The results of a rank of a training that loses others, whose messages go through Gloo on any machine."""
    dist.Backend.default_device_backend_map["cuda"] = staged_backend.NAME
    found = train(place, options, faults)
    assert type(dist.group.WORLD) is staged_backend.Staged
    return found
