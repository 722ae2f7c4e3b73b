"""Layers of a plain sequence that leave values for each other: refused by an example, or at their first forward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipefit as pf
from pipefit.errors import ModelError
from pipefit.runtime.launch import launch

GLOBAL: dict[str, Any] = {}


class Box:
    def __init__(self) -> None:
        self.value: Any = 0.0


class Layer(nn.Module):
    """A layer that calls a function on its input, for what this leaves or adds."""

    def __init__(self, act: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.__dict__["act"] = act

    def forward(self, h: Tensor) -> Tensor:
        found = self.act(h) if self.act else None
        h = torch.tanh(self.linear(h))
        return h if found is None else h + found


class Holds(Layer):
    """A layer that has the place in an attribute."""

    def __init__(self, place: Any, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(lambda h: act(self.place, h))
        self.__dict__["place"] = place


class OfClass(Layer):
    kept: Any = 0.0

    def forward(self, h: Tensor) -> Tensor:
        OfClass.kept = h.detach().mean()
        return super().forward(h)


class ReadsClass(Layer):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + OfClass.kept


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, h: Tensor) -> Tensor:
        self.scale.copy_(h.detach().mean(0))
        return super().forward(h)


def of_object() -> tuple[nn.Module, nn.Module]:
    box = Box()
    return Holds(box, lambda box, h: setattr(box, "value", h.detach().mean())), Holds(box, lambda box, h: box.value)


def of_number() -> tuple[nn.Module, nn.Module]:
    box = Box()
    return Holds(box, lambda box, h: setattr(box, "value", h.mean().item())), Holds(box, lambda box, h: box.value)


def of_list() -> tuple[nn.Module, nn.Module]:
    kept: list[Tensor] = []
    return Holds(kept, lambda kept, h: kept.append(h.detach())), Holds(kept, lambda kept, h: kept.pop())


def of_global() -> tuple[nn.Module, nn.Module]:
    def leaves(h: Tensor) -> None:
        GLOBAL["gate"] = h.detach().sigmoid()

    def finds(h: Tensor) -> Any:
        return GLOBAL["gate"]

    return Layer(leaves), Layer(finds)


def of_closure() -> tuple[nn.Module, nn.Module]:
    kept: Any = 0.0

    def leaves(h: Tensor) -> None:
        nonlocal kept
        kept = h.detach().mean()

    return Layer(leaves), Layer(lambda h: kept)


def of_class() -> tuple[nn.Module, nn.Module]:
    return OfClass(), ReadsClass()


def of_buffer() -> tuple[nn.Module, nn.Module]:
    writes = Buffered()
    return writes, Holds(writes, lambda writes, h: writes.scale)


def trained(first: nn.Module, second: nn.Module, example: Any = None) -> list[float]:
    model = nn.Sequential(nn.Linear(8, 8), first, Layer(), Layer(), second, nn.Linear(8, 3))
    pipe = pf.Pipeline(
        model,
        loss=lambda output, y: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=2,
        schedule="1f1b",
        microbatches=2,
        example=example,
    )
    return [pipe.step(torch.randn(4, 8), torch.randn(4)) for _ in range(3)]


def trained_over_ranks() -> list[float]:
    return trained(*of_object())


CHANNELS = {
    "object": (of_object, r"place \(value\)"),
    "number": (of_number, r"place \(value\)"),
    "list": (of_list, "place"),
    "global": (of_global, "GLOBAL"),
    "closure": (of_closure, "kept"),
    "class": (of_class, r"OfClass\.kept"),
    "buffer": (of_buffer, r"1\.scale"),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_without_an_example_the_first_forward_that_leaves_something_is_refused(name: str) -> None:
    make, place = CHANNELS[name]
    with pytest.raises(ModelError, match=rf"layer 1 changes .*{place}.* layer 4 of another stage .*pass example="):
        trained(*make())


@pytest.mark.parametrize("name", CHANNELS)
def test_with_an_example_it_is_refused_before_training(name: str) -> None:
    make, _ = CHANNELS[name]
    with pytest.raises(ModelError, match=r"layer 4 .*return the value as part of the output"):
        trained(*make(), example=(torch.randn(2, 8), torch.randn(2)))


def test_an_example_with_which_the_layers_do_not_run_proves_nothing() -> None:
    first, second = of_object()
    one = torch.randn(1, 8)  # a batch norm that trains needs two samples
    with pytest.raises(ModelError, match=r"layer 1 changes .*of another stage"):
        trained(nn.Sequential(nn.BatchNorm1d(8), first), second, example=(one, torch.randn(1)))


@pytest.mark.dist
def test_over_two_processes_the_rank_of_the_layer_that_leaves_something_refuses_it() -> None:
    with pytest.raises(ModelError, match=r"layer 1 changes .*value.* layer 4 of another stage"):
        launch(trained_over_ranks, 2, quiet=True)


def test_a_log_that_no_layer_reads_trains_when_an_example_proves_it() -> None:
    log: list[float] = []
    first, second = (Holds(log, lambda log, h: log.append(h.mean().item())) for _ in range(2))
    assert len(trained(first, second, example=(torch.randn(2, 8), torch.randn(2)))) == 3


def test_layers_that_draw_from_pythons_random_numbers_leave_nothing() -> None:
    first, second = (Layer(lambda h: 0.1 * random.random()) for _ in range(2))
    assert len(trained(first, second, example=(torch.randn(2, 8), torch.randn(2)))) == 3


def test_settings_that_layers_share_and_do_not_change_train_and_leave_no_hooks() -> None:
    box = Box()
    first, second = Holds(box, lambda box, h: box.value), Holds(box, lambda box, h: box.value)
    assert len(trained(first, second)) == 3
    assert not first._forward_hooks and not first._forward_pre_hooks


def test_a_pipeline_that_was_closed_before_its_first_steps_leaves_no_hooks_and_its_model_can_be_copied() -> None:
    box = Box()
    box.value = torch  # a module of Python cannot be copied
    layers = [Holds(box, lambda box, h: None) for _ in range(2)]
    pipe = pf.Pipeline(nn.Sequential(*layers), loss=lambda h, y: h.mean(), optimizer=torch.optim.SGD, stages=2)
    assert all(layer._forward_hooks for layer in layers)
    copy.deepcopy([layer._forward_hooks for layer in layers])
    pipe.close()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
