"""Replays inside a backward, by torch's checkpoints: of layers from their inputs, or only of the cores of attention.

    layer        x ─► norm ─► q k v ─► softmax(q·kᵀ)·v ─► out ─► …      keeps x
    selective                 └ keeps ┘ again: └─────┘                  keeps all but the scores

A replay draws the random numbers of its forward, and counts no statistics of batch norms: those count around forwards.

Source: Narayanan et al. (SC 2021) §3.5; Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (2022) §5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pipefit.errors import PlanError
from pipefit.stage.compiler import Forward, is_one_of_torch
from pipefit.stage.split import NamedLayer

_CORES: set[Callable[..., Any]] = {F.scaled_dot_product_attention}

replayed = functools.partial(checkpoint, use_reentrant=False)
"""Calls a function so that its backward replays it: `replayed(function, *args)`."""


def attention_core(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function, which modes of torch can see, as a core of attention: (query, key, value) to their mix."""
    _CORES.add(function)
    return function


class AttentionCores(TorchFunctionMode):
    """While it is entered, calls `around(core, *args)` in place of each core of attention.

    Args:
        around: by default, the core is replayed in the backward.
    """

    def __init__(self, around: Callable[..., Any] = replayed) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        return (self._around(func, *args, **kwargs or {})) if func in _CORES else func(*args, **kwargs or {})


def replayed_module(layer: NamedLayer, num_layers: int) -> nn.Module | None:
    """The module of a layer that is replayed from its input; None: the layer keeps what it saves.

    A single module of torch keeps little more than its input. The model's last layer would be replayed right after its
    forward. Of a model that was cut, blocks are replayed, not the code around them.
    """
    if layer.index == num_layers - 1:
        return None
    module = layer.module.block if hasattr(layer.module, "through") else layer.module
    return None if module is None or is_one_of_torch(module) else module


def replayed_forwards(layers: Iterable[NamedLayer], num_layers: int) -> dict[nn.Module, Forward]:
    """The modules of some layers that are replayed, with forwards that do so, for `replaced_forwards`."""
    modules = (replayed_module(layer, num_layers) for layer in layers)
    return {module: functools.partial(replayed, module.forward) for module in modules if module is not None}


def check_attention(layers: Iterable[NamedLayer]) -> None:
    """Checks that some layer has attention whose core can be replayed.

    Raises:
        PlanError: none has, or it does not use torch's function for it.
    """
    every = [module for layer in layers for module in layer.module.modules()]
    ways = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in every}
    if other := ways - {None, "sdpa"}:
        raise PlanError(
            f"recompute selective: the model's attention is {min(other)!r}, whose scores cannot be distinguished; load "
            'it with attn_implementation="sdpa", or use recompute layer'
        )
    kinds = {type(module).__name__ for module in every if not isinstance(module, nn.MultiheadAttention)}
    if not any(word in kind.lower() for kind in kinds for word in ("attention", "attn")):
        raise PlanError(
            "recompute selective replays softmax(q·kᵀ)·v of modules called …Attention… that use torch's "
            "scaled_dot_product_attention, and this model has none; use recompute layer or stage"
        )
