"""Copies of weights in half precision, made once for each version of the weights and used by all its micro-batches.

Autocast alone would make them in each forward and in each replay. The gradients are the same: a copy is a node of every
micro-batch's graph, and each backward adds the gradient, in float32, to that of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.stage.compiler import Forward

_Pair = tuple[Tensor, Tensor | None]
"""Weight and bias."""


class HalfCopies:
    """The half copies of the weights of linear layers; others are cast by autocast.

    Attributes:
        forwards: of the layers, for `replaced_forwards`.
    """

    def __init__(self) -> None:
        # Copies that were made without a graph have no gradient.
        self._copies: dict[bool, dict[nn.Module, _Pair]] = {False: {}, True: {}}
        self._version = 0
        self.forwards: dict[nn.Module, Forward] = {}

    def take(self, modules: Iterable[nn.Module], half: torch.dtype, device_type: str) -> None:
        """Begins to copy the weights of linear layers among some modules, for autocast to a type on a device."""
        self._half = half
        self._device_type = device_type
        for module in modules:
            # A subclass may compute something else; a parametrization is one.
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                self.forwards[module] = partial(self._linear, module)

    def at(self, version: int) -> None:
        """Forgets the copies of another version of the weights."""
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        """Forgets all copies, before the weights change or leave the device."""
        for copies in self._copies.values():
            copies.clear()

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        kind = self._device_type
        # The model may switch autocast off for some of its layers.
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not self._half:
            return F.linear(x, module.weight, module.bias)
        copies = self._copies[torch.is_grad_enabled()]
        pair = copies.get(module)
        if pair is None:
            bias: Tensor | None = module.bias
            if bias is not None:
                bias = self._cast(bias)
            pair = copies[module] = self._cast(module.weight), bias
        return F.linear(x, *pair)

    def _cast(self, weight: Tensor) -> Tensor:
        if weight.dtype is torch.float32:
            return weight.to(self._half)
        return weight
