"""Optimizers by name, as the verbs offer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipefit.errors import PipefitError, nearest

__all__ = ["STATE_PER_WEIGHT", "make_optimizer"]

STATE_PER_WEIGHT = {"sgd": 1.0, "adam": 2.0, "adamw": 2.0}
"""Bytes of state for each byte of weights."""


def make_optimizer(name: str, lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A maker of optimizers: "sgd" (momentum 0.9), "adam" or "adamw".

    Raises:
        PipefitError: another name; the nearest is suggested.
    """
    kinds: dict[str, Any] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True),
    }
    if name not in kinds:
        raise PipefitError(f"unknown optimizer {name!r}; {nearest(name, kinds)}")
    maker: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = kinds[name]
    return maker
