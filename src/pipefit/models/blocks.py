"""Parts that several built-in models share: named chains of layers and checks of size options."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch import nn

from pipefit.errors import ModelError

Named = tuple[str, nn.Module]
"""A layer under its name."""


def chain(layers: Iterable[Named]) -> nn.Sequential:
    """An `nn.Sequential` whose named children are the layers, in order.

    Each child is one layer of the profile: the smallest unit of a stage.
    """
    return nn.Sequential(OrderedDict(layers))


def require_positive(model: str, **sizes: int) -> None:
    """Refuses a size that is not a whole number of at least one."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ModelError(f"{model}: {name} must be a whole number of at least 1, got {size!r}")


def require_probability(model: str, **rates: float) -> None:
    """Refuses a rate outside [0, 1)."""
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ModelError(f"{model}: {name} must be at least 0 and below 1, got {rate!r}")
