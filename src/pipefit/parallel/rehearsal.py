"""One process as if it shared a rank with others: the work of its part without the exchanges, which are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.parallel.region import Region


class Exchange(NamedTuple):
    """An exchange of the processes of a rank: the name of a method of `Region`, and shape and type of its input."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None

    def run(self, region: Region, x: Tensor) -> Tensor:
        """The same exchange of another tensor of this shape."""
        return region.sum(x) if self.dim is None else getattr(region, self.name)(x, self.dim)


@dataclass
class Rehearsal(Region):
    """The first of several processes in isolation: its own tensors take the place of the others'.

    Results have the right shapes, and no process waits for another. What a layer computes in it takes as long as in a
    run; what `exchanges` names is missing.

    Attributes:
        exchanges: what would have been exchanged, in order.
    """

    exchanges: list[Exchange] = field(default_factory=list)

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM, *, spent: bool = False) -> Tensor:
        """The tensor itself."""
        self.exchanges.append(Exchange("sum", tuple(x.shape), x.dtype))
        return x

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """As many copies of the tensor as there are processes."""
        self.exchanges.append(Exchange("gathered", tuple(x.shape), x.dtype, dim))
        return torch.cat((x,) * self.size, dim)

    def scattered(self, x: Tensor, dim: int) -> Tensor:
        """The own part of the tensor."""
        self.exchanges.append(Exchange("scattered", tuple(x.shape), x.dtype, dim))
        return self.own(x, dim).contiguous()
