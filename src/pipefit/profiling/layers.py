"""A model as the profiler sees it: a chain of named layers, each from one payload to one payload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pipefit.errors import ModelError

Chain = tuple[tuple[str, nn.Module], ...]


def as_chain(model: nn.Module | Sequence[Any]) -> Chain:
    """The layers of a model with their names, in order.

    Args:
        model: an `nn.Sequential` (its children by name), a list of modules (named "0", "1", …) or of (name, module);
            any other module is one layer named "model".

    Raises:
        ModelError: there is no layer, an item is no module, or two layers have one name.
    """
    if isinstance(model, nn.Sequential):
        # named_children() would leave out the second use of one module.
        items: list[Any] = list(model._modules.items())
    elif isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        items = [("model", model)]
    elif not isinstance(model, Iterable):
        raise ModelError(f"expected an nn.Module or a list of them, got {type(model).__name__}")
    else:
        items = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(model)]
    if not items:
        raise ModelError("the model has no layers: expected at least one")
    seen: dict[str, int] = {}
    for index, item in enumerate(items):
        if len(item) != 2 or not isinstance(item[0], str) or not isinstance(item[1], nn.Module):
            raise ModelError(f"layer {index}: expected an nn.Module or (name, nn.Module), got {item!r}")
        if item[0] in seen:
            raise ModelError(f"layers {seen[item[0]]} and {index} are both named {item[0]!r}: give each its own name")
        seen[item[0]] = index
    return tuple(items)


def call_layer(name: str, layer: Any, payload: Any, shapes: str) -> Any:
    """Calls a layer; what it raises becomes a `ModelError` with the layer's name and what it was given."""
    try:
        return layer(payload)
    except Exception as error:
        raise ModelError(f"layer {name!r} raised {type(error).__name__} on {shapes}: {error}") from error
