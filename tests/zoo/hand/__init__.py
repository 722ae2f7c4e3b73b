"""Models written by hand, each around a trick that a cut may not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.specimen import Data, Specimen, vectors

WIDTH = 16
VECTORS = vectors(8)


class Shelf:
    """The models of one theme, in the order in which they are defined."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.specimens: list[Specimen] = []

    def __call__(self, name: str, data: Data = VECTORS, *, not_by_hand: str = "", **options: Any) -> Callable:
        """The decorator of a class or function that makes a model.

        Args:
            name: of the model.
            data: its input.
            not_by_hand: the reason why a person could not cut it.
            options: further ones of `Specimen`.
        """

        def put(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            by_hand = not not_by_hand
            full = f"hand/{self.theme}/{name}"
            self.specimens.append(Specimen(full, build, data, by_hand=by_hand, why=not_by_hand, **options))
            return build

        return put


class Block(nn.Module):
    """A small layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


class Host(nn.Module):
    """A first layer, some blocks, and a last layer; the trick is in the blocks, or in a forward of a subclass."""

    def __init__(self, *blocks: nn.Module, before: int = 8, after: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(before, WIDTH)
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, after)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
