"""Optimizers that step the parts of a weight as they step all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from pipefit.errors import PlanError
from pipefit.parallel.mesh import _ELEMENTWISE, Mesh
from pipefit.parallel.region import Region

NO_GROUP: Any = None
SHARED = Mesh(2, 0, Region(NO_GROUP, 2, 0))


def stepped(kind: Any, weights: list[Tensor], gradients: list[list[Tensor]]) -> Tensor:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = kind(parameters, lr=0.1)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def differs_in_parts(kind: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(4, 6, 4, dtype=torch.float64, generator=generator)
    whole = stepped(kind, [weight], [[gradient] for gradient in gradients])
    parts = stepped(kind, list(weight.split(3)), [list(gradient.split(3)) for gradient in gradients])
    return not torch.equal(whole, parts)


@pytest.mark.parametrize("kind", _ELEMENTWISE)
def test_optimizers_that_tensor_parallelism_takes_step_each_number_separately(kind):
    SHARED.check_optimizer(kind([nn.Parameter(torch.zeros(2))]))
    assert not differs_in_parts(kind)


def test_one_that_looks_at_whole_weights_is_refused():
    assert differs_in_parts(optim.Adafactor)
    optimizer = optim.Adafactor([nn.Parameter(torch.zeros(2))])
    with pytest.raises(PlanError, match="Adafactor is not known to"):
        SHARED.check_optimizer(optimizer)
    Mesh().check_optimizer(optimizer)


class Own(optim.SGD):
    """A user's optimizer."""


class Declared(Own):
    elementwise = True


def test_a_users_optimizer_says_that_it_is_one_of_them():
    weights = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(PlanError, match="Own is not known to: use another one, or tensor=1; if yours does, say so"):
        SHARED.check_optimizer(Own(weights))
    SHARED.check_optimizer(Declared(weights))


def test_an_optimizer_with_hooks_that_know_whole_weights_is_refused():
    optimizer = optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(PlanError, match="with hooks of its step cannot be sharded"):
        SHARED.check_optimizer(optimizer)
    Mesh().check_optimizer(optimizer)
