"""Layers of which a rank has copies, because another rank of this process has the user's own: they follow these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from pipefit.stage.split import NamedLayer


class CopiedLayers:
    """The copies that `split` has made for a rank.

    Args:
        mine: the layers of the rank.
        layers: of the whole model, the user's own.
    """

    def __init__(self, mine: Iterable[NamedLayer], layers: Sequence[NamedLayer]) -> None:
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        originals: dict[nn.Parameter, nn.Parameter] = {}
        for layer in mine:
            own = layers[layer.index].module
            if layer.module is not own:
                self._modules += zip(layer.module.modules(), own.modules(), strict=True)
                originals.update(zip(layer.module.parameters(), own.parameters(), strict=True))
        self._parameters = [(copy, original) for copy, original in originals.items() if copy is not original]
        self._changes = [original._version for _, original in self._parameters]

    def follow(self) -> None:
        """Takes what the user has changed in the originals: values, `requires_grad`, and the mode of modules."""
        if torch.is_grad_enabled():  # an evaluation has modes of its own
            for module, original in self._modules:
                module.training = original.training
        for place, (own, users) in enumerate(self._parameters):
            own.requires_grad_(users.requires_grad)
            if users._version != self._changes[place]:
                own.data.copy_(users)
                self._changes[place] = users._version
