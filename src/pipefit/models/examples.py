"""Losses and random examples of the built-in models: the shapes and types that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Example",
    "Loss",
    "image_example",
    "mean_cross_entropy",
    "text_example",
    "translation_example",
    "vector_example",
]

Loss = Callable[[Any, Any], Tensor]
Example = Callable[[int, int], tuple[Any, Any]]


def mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats over all targets: logits (…, classes) and classes (…) int64 -> a scalar."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# Where the output is divided along the classes, it can be computed on the parts.
mean_cross_entropy.is_mean_cross_entropy = True


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text_example(options: Mapping[str, Any]) -> Example:
    """Windows of random tokens: x, y (batch, context) int64, y one token later than x."""

    def example(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        shape = (batch, options["context"] + 1)
        ids = torch.randint(0, options["vocab"], shape, generator=_generator(seed))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return example


def vector_example(options: Mapping[str, Any]) -> Example:
    """Normal features (batch, inputs) float32 and random classes (batch,) int64."""

    def example(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = _generator(seed)
        x = torch.randn(batch, options["inputs"], generator=generator)
        return x, torch.randint(0, options["classes"], (batch,), generator=generator)

    return example


def image_example(options: Mapping[str, Any]) -> Example:
    """Normal images (batch, inputs, image, image) float32 and random classes (batch,) int64."""

    def example(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = _generator(seed)
        x = torch.randn(batch, options["inputs"], options["image"], options["image"], generator=generator)
        return x, torch.randint(0, options["classes"], (batch,), generator=generator)

    return example


def translation_example(options: Mapping[str, Any]) -> Example:
    """Random sentences: x = (source, target) and y, the target one token later; all (batch, length) int64."""

    def example(batch: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = _generator(seed)
        length, vocab = options["length"], options["vocab"]
        source = torch.randint(0, vocab, (batch, length), generator=generator)
        ids = torch.randint(0, vocab, (batch, length + 1), generator=generator)
        return (source, ids[:, :-1].contiguous()), ids[:, 1:].contiguous()

    return example
