"""A model of the zoo, and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.plain import Loss, bounded

Data = Callable[[int, torch.Generator], Any]
"""(samples, generator) -> the input of a model: a tensor, a tuple of positional or a dict of keyword arguments."""


@dataclass(frozen=True)
class Specimen:
    """A model of the zoo.

    Attributes:
        name: library/model or hand/theme/model.
        build: makes the model.
        data: makes its input.
        by_hand: whether a person could cut it, keeping its numbers.
        why: the reason, if not.
        is_random: its random numbers are those of one stage, which it is compared with.
        splits: its batch has micro-batches.
        loss: from its output and the target; None: the model's own.
    """

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    data: Data = field(repr=False)
    by_hand: bool = True
    why: str = ""
    is_random: bool = False
    splits: bool = True
    loss: Loss | None = bounded

    @property
    def group(self) -> str:
        """The library, or "hand"."""
        return self.name.split("/")[0]

    @property
    def samples(self) -> int:
        """Of a batch: three or two for each micro-batch; the layers of libraries have further dimensions to average."""
        return 12 if self.group == "hand" else 8

    def model(self) -> nn.Module:
        """The model, the same at every call, in float64 and in training mode."""
        torch.manual_seed(0)
        made = self.build()
        made.train()
        return made.double()

    def batch(self, samples: int, seed: int, scale: float = 1.0) -> tuple[Any, Any]:
        """Input, of which the floats are on some scale, and target, one number for each sample."""
        generator = torch.Generator().manual_seed(seed)
        x = pytree.tree_map_only(Tensor, lambda leaf: _scaled(leaf, scale), self.data(samples, generator))
        if self.loss is None:
            return x, x
        return x, torch.randn(samples, generator=generator, dtype=torch.float64)


def _scaled(leaf: Tensor, scale: float) -> Tensor:
    if leaf.is_complex():
        return leaf.to(torch.complex128) * scale
    return leaf.double() * scale if leaf.is_floating_point() else leaf


def vectors(*width: int) -> Data:
    """Samples × width of random numbers."""
    return lambda samples, generator: torch.randn(samples, *width, generator=generator)


def tokens(vocabulary: int, length: int) -> Data:
    """Samples × length of random tokens."""
    return lambda samples, generator: torch.randint(vocabulary, (samples, length), generator=generator)


def several(*parts: Data) -> Data:
    """Positional arguments."""
    return lambda samples, generator: tuple(part(samples, generator) for part in parts)


def keywords(**parts: Data) -> Data:
    """Keyword arguments."""
    return lambda samples, generator: {name: part(samples, generator) for name, part in parts.items()}


def chosen(specimens: Iterable[Specimen], prefixes: Iterable[str]) -> list[Specimen]:
    """Those whose names begin with one of some prefixes; all, if there is none."""
    prefixes = tuple(prefixes)
    return [one for one in specimens if not prefixes or one.name.startswith(prefixes)]
