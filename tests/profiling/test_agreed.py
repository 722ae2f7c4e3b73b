"""The profile that a run measures, as its stages will run."""

from typing import Any

import torch
from torch import Tensor, nn

from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.spec import Profile
from pipefit.stage.split import named_layers


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def measured(half: torch.dtype | None = None) -> Profile:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert output.dtype == torch.float32, "a run gives its loss float32"
        return nn.functional.mse_loss(output, target)

    layers = named_layers(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 16))))
    example = (torch.ones(4, 16), torch.zeros(4, 16))
    work = Workload(layers, loss, sgd, torch.device("cpu"), example, half=half)
    profile = agreed_profile(work, [2], current(), repeats=3, warmup=1)
    assert all("forward" not in vars(layer.module) for layer in layers), "the layers are as they were"
    return profile


def test_layers_are_measured_in_the_type_that_they_will_compute_in() -> None:
    whole = measured()
    half = measured(half=torch.bfloat16)
    sizes = [layer.output_bytes for layer in whole.layers]
    assert sizes == [2 * 32 * 4, 2 * 32 * 4, 2 * 16 * 4]
    assert [layer.output_bytes for layer in half.layers] == [size // 2 for size in sizes]
    assert [layer.weight_bytes for layer in half.layers] == [layer.weight_bytes for layer in whole.layers]


def test_half_copies_of_weights_are_not_among_what_each_micro_batch_saves() -> None:
    half = measured(half=torch.bfloat16)
    assert [layer.copy_bytes for layer in half.layers] == [2 * (16 * 32 + 32), 0, 2 * (32 * 16 + 16)]
    assert [layer.saved_bytes for layer in half.layers] == [2 * 2 * 16, 2 * 2 * 32, 0]
