"""Half copies of weights: made once for all micro-batches, with the numbers of plain autocast to the bit."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit import Pipeline, Spilled
from pipefit.stage.half_copies import HalfCopies

MICROBATCHES = 4


class Casts(TorchDispatchMode):
    """Counts conversions to half precision, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.found[tuple(result.shape)] += 1
        return result


class Peculiar(nn.Module):
    """Uses its weights without a gradient, without autocast, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.image = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.first(x)
        with torch.autocast("cpu", enabled=False):
            exact = self.first(x.float())
        twice = self.first(self.first(x))
        return self.image((target + exact + twice).view(-1, 3, 4)).flatten(1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), Peculiar(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 10), torch.randn(8, 5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def plainly(steps: int) -> dict[str, Tensor]:
    """Weights after some steps of plain torch with the same micro-batches."""
    model = network()
    optimizer = sgd(model.parameters())
    x, y = batch()
    for _ in range(steps):
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(part)
            (nn.functional.mse_loss(output.float(), target) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def pipeline(**options: Any) -> Pipeline:
    settings = {"stages": 1, "optimizer": sgd, "microbatches": MICROBATCHES, "precision": "bf16"} | options
    return Pipeline(network(), loss=nn.functional.mse_loss, **grouped(**settings))


@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}, {"recompute": "layer"}, {"schedule": "zb-h1"}])
def test_the_weights_are_those_of_plain_autocast(options: dict[str, Any]) -> None:
    pipe = pipeline(**options)
    for _ in range(3):
        pipe.step(*batch())
    trained = pipe.state_dict()
    for name, weight in plainly(3).items():
        assert torch.equal(trained[name], weight), name


def test_a_weight_is_cast_once_in_a_step() -> None:
    pipe = pipeline()
    pipe.step(*batch())
    with Casts() as casts:
        pipe.step(*batch())
    assert casts.found[12, 10] == casts.found[12, 12] == casts.found[7, 12] == casts.found[5, 7] == 1


def test_replayed_layers_use_the_copies_of_their_forwards() -> None:
    pipe = pipeline(recompute="layer")
    pipe.step(*batch())
    with Casts() as casts:
        pipe.step(*batch())
    assert casts.found[12, 12] == 1


def test_a_gradient_is_cast_as_soon_as_it_is_complete() -> None:
    """Autograd runs older nodes later, and copies are older than all but the first micro-batch."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    halves = HalfCopies()
    halves.take(layers, torch.bfloat16, "cpu")
    order: list[str] = []
    for index, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(f"weight {index}"))
    for _ in range(2):
        order.clear()
        x = torch.randn(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            for index, layer in enumerate(layers):
                x = halves.forwards[layer](x)
                x.register_hook(lambda _, index=index: order.append(f"output {index}"))
        x.sum().backward()
        assert order == ["output 2", "weight 2", "output 1", "weight 1", "output 0", "weight 0"]


def test_a_copy_that_was_made_in_inference_mode_trains() -> None:
    layer = nn.Linear(4, 4)
    halves = HalfCopies()
    halves.take([layer], torch.bfloat16, "cpu")
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            halves.forwards[layer](x)
        halves.forwards[layer](x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("keep", ["none", "all"])
def test_a_spilled_stage_casts_its_weights_once_in_a_visit(keep: str) -> None:
    resident, spilled = pipeline(stages=4), pipeline(stages=4, chunks=4, spill=Spilled(keep=keep))
    assert [resident.step(*batch()) for _ in range(3)] == [spilled.step(*batch()) for _ in range(3)]
    with Casts() as casts:
        spilled.step(*batch())
    assert casts.found[7, 12] == 2
    spilled.close()
