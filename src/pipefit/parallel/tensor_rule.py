"""Sharding of weights over tensor-parallel processes, and the rule of a module for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ShardSpec:
    """One dimension of a weight, split evenly; where it joins several weights, each of these is split separately.

    A fused projection for query, key and value has rows [q | k | v] and `parts=3`: process j gets the j-th share of the
    heads of each, again as [q | k | v].

    Attributes:
        dim: the dimension that is split.
        parts: number of weights joined along it.
    """

    dim: int = 0
    parts: int = 1

    def part(self, whole: Any, index: int, width: int) -> Tensor:
        """The part of process `index` of `width`, a new tensor; of a slice of a file (safetensors) no more is read.

        >>> ShardSpec(0, parts=2).part(torch.arange(8), 1, 2)
        tensor([2, 3, 6, 7])
        """
        if isinstance(whole, Tensor):
            shape = whole.shape
        else:
            shape = whole.get_shape()
        size = shape[self.dim] // (self.parts * width)
        before = (slice(None),) * self.dim
        found = []
        for part in range(self.parts):
            start = (part * width + index) * size
            found.append(whole[*before, start : start + size])
        return torch.cat(found, self.dim).detach()

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The weight from the parts of all processes.

        >>> ShardSpec(0, parts=2).whole([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        shares = [part.unflatten(self.dim, (self.parts, -1)) for part in parts]
        return torch.cat(shares, self.dim + 1).flatten(self.dim, self.dim + 1)

    def shape(self, part: torch.Size, width: int) -> torch.Size:
        """The shape of the whole."""
        return torch.Size(size * width if dim == self.dim else size for dim, size in enumerate(part))


@dataclass(frozen=True)
class TensorRule:
    """The tensor parallelism of one kind of layer: its class has this as `tensor_rule`.

    A layer that others wrote has rules for modules inside it, by its method `tensor_rules`.

    Attributes:
        becomes: class whose `forward` uses the parts and communicates through `self.region`; it replaces the module's
            own class, which is its last base, and the parameters keep their names.
        shards: the split of each sharded parameter, by its name in the module; all processes hold the others whole.
        sizes: the numbers of a module that must be multiples of the width, by name.
        takes_whole: its input is the model's, the same on every process, even under sequence parallelism.
        gives_shares: its output is split along the last dimension (the vocabulary); the loss joins it.
        may_stay_whole: outside it looks as a whole module does, so it may stay one where its sizes do not fit.
    """

    becomes: type[nn.Module]
    shards: Mapping[str, ShardSpec]
    sizes: Callable[[Any], Mapping[str, int]]
    takes_whole: bool = False
    gives_shares: bool = False
    may_stay_whole: bool = False


class Ruled(NamedTuple):
    """A module with its rule."""

    module: nn.Module
    rule: TensorRule


def rules_of(layers: Iterable[nn.Module]) -> list[Mapping[str, Ruled] | None]:
    """The modules of each layer that have rules, by their paths, "" for the layer itself; None: it has none.

    Raises:
        ModelError: the plan of a model that was cut cannot be followed.
    """
    found: list[Mapping[str, Ruled] | None] = []
    known: dict[nn.Module, Any] = {}
    for layer in layers:
        rule = getattr(type(layer), "tensor_rule", None)
        inside: Any = getattr(layer, "tensor_rules", None)
        if isinstance(rule, TensorRule):
            found.append({"": Ruled(layer, rule)})
        elif inside is not None:
            found.append(inside(known))
        else:
            found.append(None)
    return found
