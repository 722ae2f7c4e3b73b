"""Optimizers by name, and learning-rate schedules, for the verbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from pipefit.errors import PipefitError, look_up

STATE_PER_WEIGHT = {"sgd": 1.0, "adam": 2.0, "adamw": 2.0}
"""Bytes of state for each byte of weights."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {},
    "adamw": {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True},
}
_KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_FLOOR = 0.05
"""The last learning rate of a schedule that falls, as a part of the peak."""


def make_optimizer(
    name: str, lr: float, weight_decay: float | None = None, betas: Sequence[float] = ()
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A maker of optimizers: "sgd" (momentum 0.9), "adam" or "adamw".

    Args:
        name: the name of the optimizer.
        lr: peak learning rate.
        weight_decay: None: 0.1 for adamw, else 0.
        betas: the betas of the two moments; (): 0.9 and 0.99 for adamw, 0.9 and 0.999 for adam.

    Raises:
        PipefitError: another name (the nearest is suggested), or `betas` that the optimizer does not take.
    """
    settings = look_up(name, _DEFAULTS, "unknown optimizer") | {"lr": lr}
    if weight_decay is not None:
        settings["weight_decay"] = weight_decay
    if betas:
        settings["betas"] = _checked_betas(name, betas)
    return partial(_KINDS[name], **settings)


def _checked_betas(name: str, betas: Sequence[float]) -> tuple[float, float]:
    if name == "sgd":
        raise PipefitError("--betas: sgd has none; give adam or adamw, or leave them out")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PipefitError(f"--betas: expected two numbers from 0 to below 1, like 0.9,0.95; got {list(betas)}")
    first, second = betas
    return first, second


class Rates(LRScheduler):
    """Learning rates of a run: up to the peak in `warmup` steps, then constant, or down to 5 % of the peak.

    Its settings are part of its state, so that a run that resumes keeps the rates of the first one.

    Args:
        optimizer: the optimizer of a stage; its rate is the peak.
        kind: "cosine", "linear" or "constant".
        warmup: steps of linear warm-up.
        num_steps: the number of steps of the run; later ones have the last rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, warmup: int, num_steps: int) -> None:
        self.kind = kind
        self.warmup = warmup
        self.num_steps = num_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step, of each group."""
        factor = self._factor(self.last_epoch)
        return [peak * factor for peak in self.base_lrs]

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup) / max(self.num_steps - self.warmup, 1), 1.0)
        if self.kind == "linear":
            left = 1 - done
        else:
            left = 0.5 * (1 + math.cos(math.pi * done))
        return _FLOOR + (1 - _FLOOR) * left

    def __str__(self) -> str:
        peak = max(self.base_lrs, default=0.0)
        return f"peak {peak:g}, warm-up {self.warmup}, {self.kind} over {self.num_steps} steps"


def rates(kind: str, warmup: int, num_steps: int) -> Callable[[torch.optim.Optimizer], Rates]:
    """A maker of learning-rate schedules, for any optimizer; see `Rates`."""
    return partial(Rates, kind=kind, warmup=warmup, num_steps=num_steps)
