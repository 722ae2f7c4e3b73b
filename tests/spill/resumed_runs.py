"""Trainings that are cut off and resumed, for the tests of spilling."""

from functools import cache

import torch
from torch import nn

from pipefit import Pipeline
from pipefit.spec.options import Parallelism, Spilled, Updates

STEPS = 6


HALF = 4 * 4096  # of nine records in all


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def dampened(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.1)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.01, initial_accumulator_value=0.1)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def network(width=16):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 16), nn.Linear(16, 4)
    )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def pipeline(
    folder=None, optimizer=adamw, width=16, clip=0.5, counts=(3, 2, 1), seed=3, microbatches=3, frozen=0, **how
):
    model = network(width)
    model[:frozen].requires_grad_(False)
    return Pipeline(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        stages=list(counts),
        microbatches=microbatches,
        spill=Spilled(disk=folder, **how),
        parallelism=Parallelism(chunks=len(counts)),
        updates=Updates(clip_norm=clip, scheduler=halving, seed=seed),
    )


def trained(pipe, until=STEPS):
    return [pipe.step(*batch(step)) for step in range(pipe.num_updates, until)]


@cache
def whole(**how):
    """Losses and weights of a run that nothing stops."""
    pipe = pipeline(**how)
    losses = trained(pipe)
    state = pipe.state_dict()
    pipe.close()
    return losses, state


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def cut_off(folder, steps=3, **how):
    """A run that ends after some steps, as if its process had died: nothing of it is kept but its folder."""
    pipe = pipeline(folder, **how)
    losses = trained(pipe, steps)
    pipe.close()
    return losses
