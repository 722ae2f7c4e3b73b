"""Small trainings, resident and spilled, for the tests of spilling."""

from functools import cache

import torch
from torch import nn

from pipefit import Pipeline
from pipefit.spec.options import Parallelism, Spilled, Updates


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def dampened(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.01, initial_accumulator_value=0.1)


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, 0.01, momentum=0.5)


def factored(parameters):
    return torch.optim.Adafactor(parameters)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def data(steps=4):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)) for _ in range(steps)
    ]


def resident(optimizer=momentum, clip=None, model=None):
    return Pipeline(
        model or network(),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        stages=1,
        microbatches=3,
        updates=Updates(clip_norm=clip, scheduler=halving, seed=3),
    )


@cache
def expected(optimizer=momentum, clip=None):
    """Losses and weights of the resident run over all the data, which many tests compare theirs with."""
    pipe = resident(optimizer, clip)
    losses = [pipe.step(x, y) for x, y in data()]
    return losses, pipe.state_dict()


def spilled(optimizer=momentum, clip=None, model=None, counts=(3, 2, 1, 1), **how):
    return Pipeline(
        model or network(),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        stages=list(counts),
        microbatches=3,
        spill=Spilled(**how),
        parallelism=Parallelism(chunks=len(counts)),
        updates=Updates(clip_norm=clip, scheduler=halving, seed=3),
    )


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
