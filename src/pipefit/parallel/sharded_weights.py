"""Weights of a replicated stage whose optimizer is sharded over the replicas.

Weights are views of flat buckets, as their gradients are. Of each bucket a replica steps one part, so it keeps one part
of the optimizer's state; then the new weights are gathered over the replicas.

    bucket     │ w7 ····· │ w6 ······ │ w5 ···· │      d = 2
    replica 0  │ steps this half │
    replica 1                    │ and this one │

`fully_shard` is not used: it shards the weights too and fetches them for every forward and backward, which a pipeline
would do once for every micro-batch. `ZeroRedundancyOptimizer` assigns whole weights to ranks, so that one large weight
is on one rank, and sends them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ModelError, PlanError
from pipefit.parallel.buckets import Bucket, GradientBuckets, layout
from pipefit.parallel.weights import GIVEN_LATER, Piece, WeightStore, places_of, refuse_hooks

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that treat every number separately, so that a part of a weight can be stepped."""


class ShardedStore(WeightStore):
    """The weight versions of a stage, stepped part by part.

    Weights that several stages share are stepped whole on every rank that holds them: they are few, and the other ranks
    that hold them are not replicas of this stage.

    Args:
        parameters: that the stage trains.
        whole: for each, whether it is stepped whole.
        replica: number of this replica.
        num_replicas: of the stage.

    Attributes:
        masters: whole weights, one for each parameter; the optimizer steps those that are stepped whole.
        pieces: the other weights that it steps.
        buckets: the gradients.
        gradients: this replica's part of each bucket, into which the sum is written.
    """

    _frees_gradients = False

    def __init__(
        self, parameters: Sequence[nn.Parameter], whole: Sequence[bool], replica: int, num_replicas: int
    ) -> None:
        self._own = [index for index, is_whole in enumerate(whole) if not is_whole]
        self._whole = [index for index, is_whole in enumerate(whole) if is_whole]
        self._replica = replica
        self._num = num_replicas
        own = [parameters[index] for index in self._own]
        flats = [self._placed(bucket, own) for bucket in layout(own, num_replicas)]
        self.buckets = GradientBuckets(own, num_replicas, freed=self._frees_gradients)
        super().__init__(parameters)
        self._flats: dict[int, list[Tensor]] = {0: flats}
        self.gradients = self._gradient_parts()
        self.pieces = list(self._cut(flats))
        self._groups: list[list[int]] = []

    @torch.no_grad()
    def _placed(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Moves the parameters of a bucket into a new flat tensor, which is returned."""
        device = parameters[bucket.members[0]].device
        flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=device)
        for member, view in zip(bucket.members, bucket.views(flat, parameters), strict=True):
            view.copy_(parameters[member].data)
            parameters[member].data = view
        return flat

    def _gradient_parts(self) -> list[Tensor]:
        """This replica's part of each bucket of gradients."""
        return [self._part(flat) for flat in self.buckets.flats]

    def _part(self, flat: Tensor) -> Tensor:
        """This replica's part of a bucket."""
        return flat.chunk(self._num)[self._replica]

    def _views(self, flats: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a version by parameter: inside its buckets, or those given."""
        data = list(others)
        own = [self._parameters[index] for index in self._own]
        for bucket, flat in zip(self.buckets.buckets, flats, strict=True):
            for member, view in zip(bucket.members, bucket.views(flat, own), strict=True):
                data[self._own[member]] = view
        return data

    def _cut(self, flats: Sequence[Tensor]) -> Iterator[Piece]:
        for number, bucket in enumerate(self.buckets.buckets):
            memory = self._memory_of(number, flats)
            size = bucket.size // self._num
            first = self._replica * size
            last = first + size
            for member, start in zip(bucket.members, bucket.starts, strict=True):
                index = self._own[member]
                low = max(start, first)
                high = min(start + self._parameters[index].numel(), last)
                if low < high:
                    master = nn.Parameter(memory[low - first : high - first])
                    yield Piece(index, low - start, high - start, number, low - first, master)

    def _memory_of(self, number: int, flats: Sequence[Tensor]) -> Tensor:
        """The memory of this replica's part of a bucket, which its pieces are cut from."""
        return self._part(flats[number])

    def steps_whole(self, index: int) -> bool:
        """Returns whether a parameter is stepped whole."""
        return index in self._whole

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Changes an optimizer of whole weights so that it steps this replica's pieces of them.

        Args:
            optimizer: fresh and made for the masters; its groups and options stay.

        Raises:
            PlanError: the optimizer does not treat every number separately, has hooks, or has states already.
        """
        if type(optimizer) not in ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise PlanError(
                f"a sharded optimizer must treat every number separately: {known} do, {type(optimizer).__name__} is "
                'not known to; use one of them, or do not shard the optimizer (shard="none")'
            )
        refuse_hooks(optimizer)
        if optimizer.state:
            raise PlanError("a sharded optimizer must be fresh, but this one keeps states already")
        self._groups = places_of(self.masters, optimizer)
        for group, indices in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [made for index in indices for made in self._stepped(index)]

    def _stepped(self, index: int) -> list[nn.Parameter]:
        """The parameters that the optimizer steps for one of the stage: its pieces here, perhaps none, or the whole."""
        if self.steps_whole(index):
            return [self.masters[index]]
        return [piece.master for piece in self.pieces if piece.index == index]

    def groups(self, optimizer: Optimizer) -> list[list[int]]:
        """The places of the masters of each group of the optimizer, which steps their pieces."""
        if len(optimizer.param_groups) > len(self._groups):
            raise ModelError(GIVEN_LATER)
        return self._groups

    def make_buckets(self, untied: Sequence[nn.Parameter]) -> GradientBuckets:
        """The buckets of its weights, which are those of their gradients."""
        return self.buckets

    def own_part(self, bucket: int) -> Tensor:
        """This replica's part of a bucket, into which the sum is written."""
        return self._part(self.buckets.flats[bucket])

    def part_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(the parameter's place, the gradient) of each piece."""
        for piece in self.pieces:
            yield piece.index, piece.of(self.gradients[piece.bucket])

    def weight_parts(self, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(the part that this replica has stepped, the whole) of each bucket of a version."""
        for flat in self._flats[version]:
            yield self._part(flat), flat

    def begin_step(self, version: int, in_place: bool) -> None:
        """Prepares pieces and gradients for the optimizer, which turns `version` into `version` + 1."""
        self._flats[version + 1] = self._flats[version]
        super().begin_step(version, in_place)
        for piece in self.pieces:
            piece.master.grad = None
            if self._has_gradient(piece.index):
                piece.master.grad = piece.of(self.gradients[piece.bucket])

    def _has_gradient(self, index: int) -> bool:
        """Returns whether a backward of this update has reached a parameter."""
        return self._parameters[index].grad is not None

    def _copied(self, version: int) -> list[Tensor]:
        """Copies of this replica's parts of a version, in the buckets of the next; the others are gathered later."""
        flats = [torch.empty_like(flat) for flat in self._flats[version]]
        for new, kept in zip(flats, self._flats[version], strict=True):
            self._part(new).copy_(self._part(kept))
        for piece in self.pieces:
            piece.master.data = piece.of(self._part(flats[piece.bucket]))
        self._flats[version + 1] = flats
        data = list(self._versions[version])
        for index in self._whole:
            data[index] = data[index].clone()
        return self._views(flats, data)

    def end_step(self) -> None:
        """Frees the gradients."""
        super().end_step()
        for piece in self.pieces:
            piece.master.grad = None

    def release(self) -> None:
        """Gives every weight its own memory; the store cannot be used afterwards."""
        for index in self._own:
            self._parameters[index].data = self._parameters[index].data.clone()

    def drop(self, version: int) -> None:
        """Frees a version."""
        super().drop(version)
        del self._flats[version]

    def rebase(self) -> None:
        """Renumbers the newest version as 0."""
        self._flats = {0: self._flats[max(self._flats)]}
        super().rebase()
