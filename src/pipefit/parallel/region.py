"""The communication inside tensor-parallel layers, each with its mirror image in the backward.

                     forward                     backward
    enter            nothing                     sum over the processes         before a column-parallel product
    leave            sum over the processes      nothing                        after a row-parallel product
  under sequence parallelism
    enter            gather the sequence         reduce-scatter
    leave            reduce-scatter              gather the sequence

Source: Shoeybi et al. 2019 §3 (f and g), Korthikanti et al. 2022 §4.2 (g and its conjugate along the sequence).

The layers are pipefit's own and not DTensor's: weight versions are swapped under the live parameters, gradients are
views of flat buckets, and messages are split into pieces, all of which need plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from pipefit.parallel.torch_names import all_gather_single, reduce_scatter_single
from pipefit.parallel.waiting import collective, finish

Move = Callable[[Tensor], Tensor]


@dataclass
class Region:
    """The processes that share a rank, as seen by one of them.

    Attributes:
        group: of the processes.
        size: number of processes, t.
        index: of this process among them, j.
        sequence: whether work that all processes would repeat is split along the sequence (dimension 1).
        moved_bytes: bytes that this process has sent to the others in the pass, counted as a ring sends them.
        is_divided: what is computed now is split over heads or columns; of modules that `WholeMasks` watches.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    sequence: bool = False
    moved_bytes: float = 0.0
    is_divided: bool = False

    def __deepcopy__(self, memo: object) -> Region:
        """The region itself: a copy of a layer that has it works with the same processes."""
        return self

    # ---- called by layers ------------------------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """The input of a column-parallel product: (b, s, h); under sequence parallelism (b, s/t, h).

        A tensor that several products take (query, key, value) is entered once, so its gradient is summed once.
        """
        if self.sequence:
            return _Mirrored.apply(x, partial(self.gathered, dim=1), partial(self.scattered, dim=1))
        known = getattr(x, "entered", None)
        if known is not None and known[0] == x._version:
            return known[1]
        # No view of x, which x would hold and which would hold x, and with it all that was saved for the backward.
        entered = _Mirrored.apply(x, Tensor.detach, self.sum)
        if entered.requires_grad and not x.is_leaf:  # a leaf and its graph would hold each other
            vars(x)["entered"] = x._version, entered
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """The output of a row-parallel product, summed, perhaps in place; nothing else may use the argument."""
        if self.sequence:
            return _Mirrored.apply(x, partial(self.scattered, dim=1), partial(self.gathered, dim=1))
        return _Mirrored.apply(x, partial(self.sum, spent=True), _unchanged)

    def shared(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Weights that all processes hold whole. Under sequence parallelism their gradients are summed."""
        if self.sequence:
            return self.summed(*weights)
        return weights

    def summed(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Weights that all processes hold whole and use for their own parts: their gradients are summed."""
        return _Shared.apply(self, *weights)

    def join(self, x: Tensor, dim: int = -1) -> Tensor:
        """Parts of an output, joined for a computation that all processes repeat (a loss): the gradient is split."""
        dim %= x.dim()
        return _Mirrored.apply(x, partial(self.gathered, dim=dim), lambda grad: self.own(grad, dim).contiguous())

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This process's part of what all have computed alike: the gradient is joined."""
        dim %= x.dim()
        return _Mirrored.apply(x, lambda x: self.own(x, dim).contiguous(), partial(self.gathered, dim=dim))

    def places(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where token ids are among the `size` rows of this process, and which of them are there at all.

        Raises:
            IndexError: an id that no process has.
        """
        if ids.device.type == "cpu" and not isinstance(ids, FakeTensor):
            low, high = int(ids.min()), int(ids.max())
            total = size * self.size
            if low < 0 or high >= total:
                raise IndexError(f"token ids from 0 to {total - 1} exist, got {low} to {high}")
        place = ids - self.index * size
        here = (place >= 0) & (place < size)
        return place.clamp(0, size - 1), here

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of a tensor that all have."""
        return x.chunk(self.size, dim)[self.index]

    def dropout(self, x: Tensor, rate: float, training: bool) -> Tensor:
        """Dropout of (b, s, h), or of this process's (b, s/t, h): the mask is that of a single process.

        The mask of the whole is drawn everywhere, from the same seed, and each takes its part.
        """
        if not training or rate == 0.0:
            return x
        if self.sequence:
            return self.own_dropout(x, rate, 1)
        return torch.nn.functional.dropout(x, rate)

    def own_dropout(self, x: Tensor, rate: float, dim: int) -> Tensor:
        """Dropout of this process's part along a dimension, such as its heads: by its part of the mask of the whole."""
        shape = list(x.shape)
        shape[dim] *= self.size
        return x * self.own(_mask(x, shape, rate), dim)

    # ---- communication ---------------------------------------------------------------------------------------------

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM, *, spent: bool = False) -> Tensor:
        """All-reduce, in a new tensor; one that is `spent` may itself become the result."""
        if self._has_only_shape(x):
            return x
        self.moved_bytes += 2 * (self.size - 1) / self.size * x.nbytes
        if self._is_pair(x):
            other = self._exchanged(x)
            if op == dist.ReduceOp.MAX:
                return torch.maximum(other, x, out=other)
            return other.add_(x)
        if spent:
            result = x
        else:
            result = x.clone(memory_format=torch.contiguous_format)
        collective(dist.all_reduce, result, op, group=self.group)
        return result

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """All-gather along a dimension."""
        if self._has_only_shape(x):
            return torch.cat((x,) * self.size, dim)
        self.moved_bytes += (self.size - 1) * x.nbytes
        x = x.contiguous()
        if self._is_pair(x):
            parts = [self._exchanged(x), x]
            if self.index == 0:
                parts.reverse()
            return torch.cat(parts, dim)
        rows, *others = x.shape or (1,)
        out = x.new_empty((self.size * rows, *others))
        collective(all_gather_single, out, x, group=self.group)
        if dim == 0:
            return out
        return out.unflatten(0, (self.size, -1)).movedim(0, dim).flatten(dim, dim + 1)

    def scattered(self, x: Tensor, dim: int) -> Tensor:
        """Reduce-scatter along a dimension."""
        self.moved_bytes += (self.size - 1) / self.size * x.nbytes
        if self._is_pair(x):
            parts = x.chunk(2, dim)
            return self._exchanged(parts[1 - self.index]).add_(parts[self.index])
        stacked = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        if x.device.type != "cpu":
            out = torch.empty_like(stacked[0])
            reduce_scatter_single(out, stacked.flatten(0, 1), group=self.group)
            return out
        # Gloo would sum everything on every process: here parts are exchanged, and each adds up its own.
        given = torch.empty_like(stacked)
        collective(dist.all_to_all_single, given, stacked, group=self.group)
        return given.sum(0)

    def _is_pair(self, x: Tensor) -> bool:
        """Returns whether two processes on CPUs exchange whole tensors: the same bytes, with only one wait."""
        return self.size == 2 and x.device.type == "cpu"

    def _has_only_shape(self, x: Tensor) -> bool:
        """Returns whether a module only says its shapes: real processes cannot exchange a tensor without numbers."""
        return x.is_meta and dist.get_backend(self.group) != dist.Backend.FAKE

    def _exchanged(self, x: Tensor) -> Tensor:
        """The tensor that the other of two processes sends in exchange for x."""
        x = x.contiguous()
        other = torch.empty_like(x)
        peer = 1 - self.index
        coming = self.group.recv([other], peer, 0)
        finish(coming, self.group.send([x], peer, 0))
        return other


class Exchange(NamedTuple):
    """An exchange of the processes of a rank: the name of a method of `Region`, and shape and type of its input."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None

    def run(self, region: Region, x: Tensor) -> Tensor:
        """Repeats the exchange with another tensor of this shape."""
        if self.dim is None:
            return region.sum(x)
        return getattr(region, self.name)(x, self.dim)


@dataclass
class IsolatedRegion(Region):
    """The first of several processes in isolation: its own tensors replace those of the others.

    Results have the right shapes, and no process waits for another. The computation of a layer takes as long as in a
    run; the communication in `exchanges` is missing.

    Attributes:
        exchanges: the omitted exchanges, in order.
    """

    exchanges: list[Exchange] = field(default_factory=list)

    def sum(self, x: Tensor, op: Any = None, *, spent: bool = False) -> Tensor:
        """The tensor itself."""
        if x.is_meta:
            return x
        return self._noted("sum", x)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """As many copies of the tensor as there are processes."""
        if not x.is_meta:
            self._noted("gathered", x, dim)
        return torch.cat([x] * self.size, dim)

    def scattered(self, x: Tensor, dim: int) -> Tensor:
        """The own part of the tensor."""
        return self.own(self._noted("scattered", x, dim), dim).contiguous()

    def _noted(self, name: str, x: Tensor, dim: int | None = None) -> Tensor:
        self.exchanges.append(Exchange(name, tuple(x.shape), x.dtype, dim))
        return x


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def _mask(x: Tensor, shape: Sequence[int], rate: float) -> Tensor:
    """The factors of torch's dropout on a CPU, of this shape."""
    kept = x.new_empty(shape).bernoulli_(1 - rate)
    if rate < 1:
        return kept.div_(1 - rate)
    return kept


class _Mirrored(Function):
    """A communication in the forward, and its mirror image in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        result = there(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


class _Shared(Function):
    """One all-reduce for the gradients of all weights of a layer that are whole everywhere; they are small."""

    @staticmethod
    def forward(ctx: Any, region: Region, *weights: Tensor) -> Any:
        ctx.region = region
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = ctx.region.sum(torch.cat([grad.reshape(-1) for grad in grads]), spent=True)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))
