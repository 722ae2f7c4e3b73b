"""Copies of weights in half precision, made once for each version of the weights and used by all its micro-batches.

Autocast alone would make them in each forward and in each replay. The gradients are the same: a copy is a node of every
micro-batch's graph, and each backward adds the gradient, in float32, to that of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.stage.compiler import Forward

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Pair = tuple[Tensor | None, Tensor | None]
"""Weight and bias."""


class HalfCopies:
    """The half copies of the weights of linear layers and convolutions; others are cast by autocast.

    Args:
        modules: of a stage.
        half: the type of autocast.
        device_type: of the stage.

    Attributes:
        forwards: of the modules, for `replaced_forwards`.
    """

    def __init__(self, modules: Iterable[nn.Module], half: torch.dtype, device_type: str) -> None:
        self._half = half
        self._device_type = device_type
        # Copies that were made without a graph have no gradient.
        self._copies: dict[bool, dict[nn.Module, _Pair]] = {False: {}, True: {}}
        self._version = 0
        self.forwards: dict[nn.Module, Forward] = {}
        for module in modules:
            # A subclass may compute something else; a parametrization is one.
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                self.forwards[module] = partial(self._run, module, F.linear)
            elif type(module) in _CONVOLUTIONS and "forward" not in module.__dict__:
                self.forwards[module] = partial(self._run, module, module._conv_forward)

    def at(self, version: int) -> None:
        """Forgets the copies of another version of the weights."""
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        """Forgets all copies, before the weights change or leave the device."""
        for copies in self._copies.values():
            copies.clear()

    def _run(self, module: Any, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        kind = self._device_type
        # The model may switch autocast off for some of its layers.
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not self._half:
            return function(x, module.weight, module.bias)
        copies = self._copies[torch.is_grad_enabled()]
        pair = copies.get(module)
        if pair is None:
            pair = copies[module] = self._cast(module.weight), self._cast(module.bias)
        return function(x, *pair)

    def _cast(self, weight: Tensor | None) -> Tensor | None:
        if weight is None or weight.dtype is not torch.float32:
            return weight
        return weight.to(self._half)
