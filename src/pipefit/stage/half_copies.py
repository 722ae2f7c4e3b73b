"""Copies of weights in half precision, made once for each version of the weights and used by all its micro-batches.

Autocast alone would make them in each forward and in each replay. The gradients are the same: a copy is a node of every
micro-batch's graph, and each backward adds the gradient, in float32, to that of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.stage.compiler import Forwards
from pipefit.stage.precision import Half
from pipefit.stage.split import modules_of

_AT_ONCE = torch.iinfo(torch.int64).max
"""The place in a backward of a node that runs as soon as its gradient is complete."""


class HalfCopies:
    """The half copies of the weights of linear layers; others are cast by autocast.

    Attributes:
        forwards: of the layers, for `replaced_forwards`.
        copies: those that are there, by their weights.
        half: their type; None: there are none.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self.half: Half = None
        self._version = 0
        self.forwards: Forwards = {}

    def __deepcopy__(self, memo: object) -> HalfCopies:
        """Itself: a copied attribute of a module, such as its forward, uses the same copies."""
        return self

    def take(self, layers: Iterable[nn.Module], half: torch.dtype, device_type: str) -> None:
        """Begins to copy the weights of linear modules in some layers, for autocast to a type on a device."""
        self.half = half
        self._device_type = device_type
        for layer in layers:
            for _, module in modules_of(layer):
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
        self.copies.clear()
        self._weights.clear()

    def of(self, weight: Tensor) -> Tensor:
        """The copy of a weight, made if it is not there."""
        if weight.dtype is not torch.float32:
            return weight
        if weight not in self.copies:
            copy = self.copies[weight] = self._made(weight)
            self._weights[copy.untyped_storage()._cdata] = weight
        return self.copies[weight]

    def weight_of(self, tensor: Tensor) -> Tensor | None:
        """The weight in whose copy a tensor lies; None: in no copy."""
        return self._weights.get(tensor.untyped_storage()._cdata)

    def of_each(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The copies of some weights that are there."""
        return [self.copies[weight] for weight in weights if weight in self.copies]

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        kind = self._device_type
        weight = module.weight
        bias: Tensor | None = module.bias
        # The model may switch autocast off for some of its layers.
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self.half:
            weight = self.of(weight)
            if bias is not None:
                bias = self.of(bias)
        return F.linear(x, weight, bias)

    def _made(self, weight: Tensor) -> Tensor:
        # One copy serves forwards with and without a graph.
        with torch.inference_mode(False), torch.enable_grad():
            copy = weight.to(self.half)
        if copy.requires_grad:
            # Autograd runs older nodes later: all half gradients would wait for the end of the backward.
            node: Any = copy.grad_fn
            node._set_sequence_nr(_AT_ONCE)
        return copy
