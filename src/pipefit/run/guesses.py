"""Pictures of what a trained classifier gets right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_MOST_WRONG = 24
_MOST_RIGHT = 12


class Guess(NamedTuple):
    """The answer of a model to an image.

    Attributes:
        label: the class of the image.
        answer: the class that the model takes for the most probable one.
        share: its probability.
        pixels: brightness from 0 to f of each pixel, a text for each row.
    """

    label: int
    answer: int
    share: float
    pixels: Sequence[str]

    @property
    def is_right(self) -> bool:
        """Whether the answer is the image's class."""
        return self.answer == self.label

    @property
    def words(self) -> str:
        """Label, answer and probability."""
        if self.is_right:
            return f"{self.label} ({self.share:.0%})"
        return f"{self.label}, read as {self.answer} ({self.share:.0%})"


def guesses_of(model: nn.Module, images: Tensor, labels: Tensor) -> list[Guess]:
    """Some answers of a classifier: the wrong ones, the surest first, then right ones; at most 24 and 12.

    Args:
        model: from images to logits (n, classes).
        images: (n, 1, height, width).
        labels: (n,).
    """
    with torch.no_grad():
        shares, answers = model(images).softmax(1).max(1)
    lowest = images.min()
    levels = ((images[:, 0] - lowest) / (images.max() - lowest) * 15).round().int()
    found = []
    for label, answer, share, rows in zip(labels, answers, shares, levels, strict=True):
        pixels = ["".join(f"{level:x}" for level in row) for row in rows.tolist()]
        found.append(Guess(int(label), int(answer), float(share), pixels))
    wrong = sorted((guess for guess in found if not guess.is_right), key=lambda guess: -guess.share)
    right = [guess for guess in found if guess.is_right]
    return wrong[:_MOST_WRONG] + right[:_MOST_RIGHT]


def picture_of(guess: Guess) -> str:
    """The image as SVG text, in the colour of the text around it."""
    squares: dict[str, str] = {}
    for down, row in enumerate(guess.pixels):
        for across, level in enumerate(row):
            squares[level] = squares.get(level, "") + f"M{across} {down}h1v1h-1z"
    size = f"{len(guess.pixels[0])} {len(guess.pixels)}"
    paths = [f'<path d="{path}" opacity="{int(level, 16) / 15:.2f}"/>' for level, path in squares.items()]
    return f'<svg viewBox="0 0 {size}" fill="currentColor" shape-rendering="crispEdges">{"".join(paths)}</svg>'
