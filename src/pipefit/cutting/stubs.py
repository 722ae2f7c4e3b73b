"""Stand-ins for modules that another stage computes: they return NaN of the shapes of the module's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.tracking import stood_in
from pipefit.errors import ModelError
from pipefit.stage.record_layout import nan_of
from pipefit.stage.stage import in_mode


def nan_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """NaN (0 where there is none) in the shape and type of a tensor."""
    place = device or (torch.get_default_device() if tensor.is_meta else tensor.device)
    return torch.full(tensor.shape, nan_of(tensor.dtype), dtype=tensor.dtype, device=place)


class Stub:
    """A stand-in for a module.

    Its output has the shapes of the arguments that had the output's shapes in the example; where there are
    none, the shapes of the module's output on the meta device, found once for each kind of arguments.

    Args:
        module: stays as it is.
        alike: for each leaf of the output the place among the arguments of a tensor that had the same shape and type
            in the example, -1 for a leaf that is not a tensor, None where there is none.
        example: an output.
    """

    def __init__(self, module: nn.Module, alike: Sequence[int | None], example: Any) -> None:
        self.module = module
        self.alike = alike
        self.example = _to_meta(example)
        self._known: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """All state except the parts that can be found again."""
        return self.__dict__ | {"_known": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """NaN in the shapes of the module's output."""
        leaves = pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A module that would write to a cache of keys and values does not run: leaves without a similar argument, such
        # as attention weights, then have their shapes of the example.
        writes = any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))
        if writes or all(place is not None for place in self.alike):
            output = self._like(leaves)
        else:
            key = tuple(map(_form, leaves))
            if key not in self._known:
                self._known[key] = self._computed(args, kwargs)
            output = self._known[key]
        if given:
            device = given[0].device
        else:
            device = torch.get_default_device()
        return stood_in(pytree.tree_map_only(Tensor, lambda leaf: nan_like(leaf, device), output))

    def _like(self, given: Sequence[Any]) -> Any:
        """An output that has arguments, or tensors on the meta device, in place of tensors of the same shapes."""
        leaves, structure = pytree.tree_flatten(self.example)
        for index, place in enumerate(self.alike):
            if place is not None and place >= 0:
                leaves[index] = given[place]
        return pytree.tree_unflatten(leaves, structure)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An output on the meta device, by a run there."""
        forward = self.module.__dict__.pop("forward")
        try:
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            moved, options = _to_meta((args, kwargs))
            with torch.no_grad(), in_mode(False, self.module):  # a batch norm would update its statistics
                return torch.func.functional_call(self.module, _to_meta(dict(tensors)), moved, options)
        except Exception as problem:
            kind = type(self.module).__name__
            raise ModelError(
                f"{kind}: the shape of its output cannot be known without computing it ({problem}); give "
                "cuts=[…] so that it is before the first cut, or the model as a list of layers"
            ) from problem
        finally:
            self.module.__dict__["forward"] = forward


def _form(leaf: Any) -> Any:
    """The part of an argument on which the shapes of an output may depend; of an object only its class."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, bool | int | float | str | None):
        return type(leaf), leaf
    return type(leaf)


def _to_meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)
