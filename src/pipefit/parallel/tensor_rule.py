"""Sharding of weights over tensor-parallel processes, and the rule of a layer for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    def part(self, whole: Tensor, index: int, width: int) -> Tensor:
        """The part of process `index` of `width`; a new tensor.

        >>> ShardSpec(0, parts=2).part(torch.arange(8), 1, 2)
        tensor([2, 3, 6, 7])
        """
        size = whole.shape[self.dim] // (self.parts * width)
        shares = whole.detach().unflatten(self.dim, (self.parts, width, size)).select(self.dim + 1, index)
        return shares.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

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

    Attributes:
        becomes: class whose `forward` uses the parts and communicates through `self.region`; it replaces the layer's
            own class, and its parameters keep their names.
        shards: the split of each sharded parameter, by its name in the layer; all processes hold the others whole.
        sizes: the numbers of a layer that must be multiples of the width, by name.
        takes_whole: its input is the model's, the same on every process, even under sequence parallelism.
        gives_shares: its output is split along the last dimension (the vocabulary); the loss joins it.
    """

    becomes: type[nn.Module]
    shards: Mapping[str, ShardSpec]
    sizes: Callable[[nn.Module], Mapping[str, int]]
    takes_whole: bool = False
    gives_shares: bool = False


def rule_of(layer: nn.Module) -> TensorRule | None:
    """The rule of a layer, if its class has one."""
    rule = getattr(type(layer), "tensor_rule", None)
    return rule if isinstance(rule, TensorRule) else None
