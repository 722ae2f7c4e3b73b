"""Modules of any author over several processes: classes that are mixed into a module's own.

    Columns        enter ─ its columns                      query, key and value of its heads; up and gate
    JoinedColumns  enter ─ its columns ─ join               a head whose logits all processes need
    Rows           its rows ─ leave ─ + bias                the projections back
    SplitRows      split ─ its rows ─ leave ─ + bias        the same after something that was joined
    Tokens         its rows of the vocabulary ─ leave       an embedding
    Experts        enter ─ its columns and rows ─ leave     a mixture of experts that is one module
    OnShards       whole weights, used on its heads         a norm of each head: their gradients are summed

A forward is the module's own, with communication around it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.parallel.masks import WholeMasks
from pipefit.parallel.region import Region

_mixed: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def mixed(way: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """A module's own class with one of this file's around its forward, made once."""
    if (way, own) not in _mixed:
        _mixed[way, own] = type(f"{way.__name__}{own.__name__}", (way, own), {})
    return _mixed[way, own]


class Divided(nn.Module):
    """A module that has column- and row-parallel products inside: dropout between them is of the whole."""

    region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        self.region.is_divided = False
        with WholeMasks(self.region) if self.training else contextlib.nullcontext():
            return super().forward(*args, **kwargs)


class Columns(nn.Module):
    """A linear layer (…, h) -> (…, columns/t)."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        """Its columns of the product."""
        self.region.is_divided = True
        return super().forward(self.region.enter(x))


class JoinedColumns(nn.Module):
    """A linear layer (…, h) -> (…, columns)."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        """The columns of all processes."""
        return self.region.join(super().forward(self.region.enter(x)))


class Rows(nn.Module):
    """A linear layer (…, rows/t) -> (…, h)."""

    region: Region
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all processes' products."""
        self.region.is_divided = False
        y = self.region.leave(F.linear(x, self.weight))
        if self.bias is None:
            return y
        return y + self.bias


class SplitRows(Rows):
    """A linear layer (…, rows) -> (…, h)."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all processes' products."""
        return super().forward(self.region.split(x))


class Tokens(nn.Module):
    """An embedding (b, s) -> (b, s, h); each process has V/t tokens."""

    region: Region
    weight: Tensor

    @property
    def padding_idx(self) -> int | None:
        """The token that gets no gradient, among those of this process."""
        whole = self.__dict__["padding_idx"]
        size = self.weight.shape[0]
        if whole is None or whole // size != self.region.index:
            return None
        return whole % size

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the tokens of this process, zeros for the others, and sums over the processes."""
        place, here = self.region.places(ids, self.weight.shape[0])
        return self.region.leave(super().forward(place) * here.unsqueeze(-1))


class Experts(nn.Module):
    """A mixture of experts, each of which is split: (tokens, h), the experts of each, their weights -> (tokens, h)."""

    region: Region

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The sum of all processes' shares of each expert."""
        # Gradients of weights that are less precise than what they multiply are summed before they are rounded.
        weights = weights.to(torch.promote_types(weights.dtype, x.dtype))
        return self.region.leave(super().forward(self.region.enter(x), experts, self.region.enter(weights)))


class OnShards(nn.Module):
    """A module whose weights all processes hold whole, each for its own heads."""

    region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        parameters: dict[str, Any] = self._parameters
        own = {name: weight for name, weight in parameters.items() if weight is not None}
        if not own:
            return super().forward(*args, **kwargs)
        summed = self.region.summed(*own.values())
        try:
            parameters.update(zip(own, summed, strict=True))
            return super().forward(*args, **kwargs)
        finally:
            parameters.update(own)


class WholeDropout(nn.Module):
    """Dropout of what all processes have whole, next to what is divided (an adapter's)."""

    region: Region
    is_divided = False

    def forward(self, x: Tensor) -> Tensor:
        """The module's own forward."""
        before = self.region.is_divided
        self.region.is_divided = self.is_divided
        try:
            return super().forward(x)
        finally:
            self.region.is_divided = before


class DividedDropout(WholeDropout):
    """Dropout of what is divided, next to what all processes have whole."""

    is_divided = True
