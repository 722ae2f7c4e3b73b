"""Losses and random examples of the built-in models, in the shapes and types that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Batch = tuple[Any, Any]
"""Input and target."""
Example = Callable[[int, int], Batch]


def mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats over all targets: logits (…, classes) and classes (…) int64 -> a scalar."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# Where the output is split along the classes, it can be computed on the parts.
vars(mean_cross_entropy)["is_mean_cross_entropy"] = True


def mean_cube(output: Mapping[str, Tensor], target: Any) -> Tensor:
    """Mean of the cubes of all numbers of an output, as a loss for testing a model that has none -> a scalar.

    The mean of the squares would be the same for all weights after a layer norm.
    """
    return torch.stack([part.pow(3).mean() for part in output.values()]).mean()


def text(options: Mapping[str, Any], batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Windows of random tokens: x, y (batch, context) int64, y one token later than x."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, options["context"] + 1)
    ids = torch.randint(0, options["vocab"], shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def classified(options: Mapping[str, Any], batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal features (batch, inputs), or images (batch, inputs, image, image), and classes (batch,) int64."""
    generator = torch.Generator().manual_seed(seed)
    image = (options["image"],) * 2 if "image" in options else ()
    x = torch.randn(batch, options["inputs"], *image, generator=generator)
    return x, torch.randint(0, options["classes"], (batch,), generator=generator)
