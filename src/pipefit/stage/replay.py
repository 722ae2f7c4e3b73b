"""Replays inside a backward, by torch's checkpoints: of layers from their inputs, or only of the cores of attention.

    layer        x ─► norm ─► q k v ─► softmax(q·kᵀ)·v ─► out ─► …      keeps x
    selective                 └ keeps ┘ again: └─────┘                  keeps all but the scores

A replay draws the random numbers of its forward, and counts no statistics of batch norms: those count around forwards.

Source: Narayanan et al. (SC 2021) §3.5; Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (2022) §5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from pipefit.errors import ModelError, PlanError
from pipefit.stage.compiler import Forward, Forwards, is_one_of_torch
from pipefit.stage.split import NamedLayer, called_module, joined

_CORES: set[Forward] = {F.scaled_dot_product_attention}

replayed = functools.partial(checkpoint, use_reentrant=False)
"""Calls a function so that its backward replays it: `replayed(function, *args)`."""


def attention_core(function: Forward) -> Forward:
    """Marks a function, which modes of torch can see, as a core of attention: (query, key, value) to their mix."""
    _CORES.add(function)
    return function


class AttentionCores(TorchFunctionMode):
    """While it is entered, calls `around(core, *args)` in place of each core of attention.

    Args:
        around: by default, the core is replayed in the backward.
    """

    def __init__(self, around: Forward = replayed) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(
        self, func: Forward, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func in _CORES:
            return self._around(func, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def replayed_module(layer: NamedLayer, num_layers: int) -> nn.Module | None:
    """The module of a layer that is replayed from its input; None: the layer keeps what it saves.

    A single module of torch keeps little more than its input. The model's last layer would be replayed right after its
    forward. Of a model that was cut, blocks are replayed, not the code around them.
    """
    if layer.index == num_layers - 1:
        return None
    module = called_module(layer)
    if module is None or is_one_of_torch(module):
        return None
    return module


def replayed_forwards(layers: Iterable[NamedLayer], num_layers: int) -> Forwards:
    """The modules of some layers that are replayed, with forwards that do so, for `replaced_forwards`."""
    found: Forwards = {}
    for layer in layers:
        module = replayed_module(layer, num_layers)
        if module is not None:
            forward = functools.partial(_keeping_inputs, layer, module.forward)
            found[module] = functools.partial(replayed, forward)
    return found


def _keeping_inputs(layer: NamedLayer, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward that will be replayed from the same inputs.

    Raises:
        ModelError: it changes them in place, so a replay would change them again.
    """
    own = {id(tensor) for tensor in chain(layer.module.parameters(), layer.module.buffers())}
    leaves = pytree.tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in own]
    before = [tensor._version for tensor in given]
    output = forward(*args, **kwargs)
    if before != [tensor._version for tensor in given]:
        raise ModelError(
            f"layer {layer.name} changes its input in place, so it cannot be replayed: let it change a copy "
            "(x = x.clone()), or train without recomputation (recompute none)"
        )
    return output


def check_attention(layers: Iterable[NamedLayer]) -> None:
    """Checks that some layer has attention whose core can be replayed.

    Raises:
        PlanError: none has, or it does not use torch's function for it.
    """
    every = list(joined(layers).modules())
    ways: set[Any] = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in every}
    if other := ways - {None, "sdpa"}:
        raise PlanError(
            f"recompute selective: the model's attention is {min(other)!r}, whose scores cannot be distinguished; load "
            'it with attn_implementation="sdpa", or use recompute layer'
        )
    kinds = {type(module).__name__.lower() for module in every if not isinstance(module, nn.MultiheadAttention)}
    if not any("attention" in kind or "attn" in kind for kind in kinds):
        raise PlanError(
            "recompute selective replays softmax(q·kᵀ)·v of modules called …Attention… that use torch's "
            "scaled_dot_product_attention, and this model has none; use recompute layer or stage"
        )
