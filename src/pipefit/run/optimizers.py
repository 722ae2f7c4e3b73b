"""Optimizers by name, for the verbs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from pipefit.errors import look_up

STATE_PER_WEIGHT = {"sgd": 1.0, "adam": 2.0, "adamw": 2.0}
"""Bytes of state for each byte of weights."""


def make_optimizer(name: str, lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A maker of optimizers: "sgd" (momentum 0.9), "adam" or "adamw".

    Raises:
        PipefitError: another name; the nearest is suggested.
    """
    kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True),
    }
    return look_up(name, kinds, "unknown optimizer")


def warmed_cosine(warmup: int, num_steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
    """A schedule of learning rates, for any optimizer: up to the peak in `warmup` steps, then a cosine down to 5 %."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(num_steps - warmup, 1)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
