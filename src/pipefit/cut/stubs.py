"""Stand-ins for modules that another stage computes: they give NaN of the shapes that the module would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError

Shapes = tuple[Any, list[Any]]
"""The structure of an output and its leaves; tensors of it are on the meta device."""


def nan_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """NaN (0 where there is none) in the shape and type of a tensor; takes no memory."""
    place = device or (torch.get_default_device() if tensor.is_meta else tensor.device)
    value = float("nan") if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
    return torch.full((), value, dtype=tensor.dtype, device=place).expand(tensor.shape)


class Stub:
    """Stands in for a module.

    The shapes of its output are those that the module gives on the meta device, found once for each kind of arguments.
    Where it cannot run there, they are those of the arguments that had the output's shapes in the example.

    Args:
        module: stays as it is.
        alike: for each leaf of the output the place of an argument of the same shape and type in the example, or None.
        example: an output.
    """

    def __init__(self, module: nn.Module, alike: Sequence[int | None], example: Any) -> None:
        self.module, self.alike = module, alike
        leaves, self.structure = pytree.tree_flatten(example)
        self.example = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._known: dict[Any, Shapes] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """NaN in the shapes of the module's output."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        key = tuple((tensor.shape, tensor.dtype) for tensor in given)
        if key not in self._known:
            self._known[key] = self._shapes(args, kwargs)
        structure, leaves = self._known[key]
        device = given[0].device if given else torch.get_default_device()
        made = [nan_like(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(made, structure)

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(place is not None for place in self.alike):
            found = [
                leaf if place is None or place < 0 else given[place].to("meta")
                for leaf, place in zip(self.example, self.alike, strict=True)
            ]
            return self.structure, found
        forward: Callable[..., Any] = self.module.__dict__.pop("forward")
        try:
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            meta = {name: tensor.to("meta") for name, tensor in tensors}
            moved, options = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            with torch.no_grad():
                output = torch.func.functional_call(self.module, meta, moved, options)
        except Exception as problem:
            kind = type(self.module).__name__
            raise ModelError(
                f"{kind}: what it gives has a shape that cannot be known without computing it ({problem}); give "
                "cuts=[…] so that it lies before the first cut, or the model as a list of layers"
            ) from problem
        finally:
            self.module.__dict__["forward"] = forward
        leaves, structure = pytree.tree_flatten(output)
        return structure, leaves
