"""Gradients and weights of a stage that its replicas share: each keeps one part, and whole ones come and go.

    shards     │ w7 ····· │ w6 ······ │ w5 ···· │      d = 2
    replica 0  │ keeps this half │
    replica 1                    │ and this one │
    flat       │ whole, while the stage computes │

The memory of a flat bucket is freed and given back under the tensors that are views of it, so that what autograd saves
of a weight in a forward is the same weight when its backward comes. Meanwhile the parameters have the shapes of the
weights, and no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipefit.parallel.buckets import layout, resize
from pipefit.parallel.sharded_weights import ShardedStore


class SharedGradientsStore(ShardedStore):
    """Weights of a stage whose whole gradients are freed once they are summed: each replica keeps its part of the sum.

    Args:
        parameters: that the stage trains.
        whole: for each, whether it is stepped whole; its gradient is kept whole, too.
        replica: number of this replica.
        num_replicas: of the stage.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], whole: Sequence[bool], replica: int, num_replicas: int
    ) -> None:
        super().__init__(parameters, whole, replica, num_replicas)
        self._reached = torch.zeros_like(self.buckets.marks)
        self._never = set(self._own)
        # In memory of their own, from the first sum of an update to its step.
        self.gradients = [torch.zeros_like(part) for part in self.gradients]
        self._free_sums()
        self.buckets.free()

    def own_part(self, bucket: int) -> Tensor:
        """Memory for this replica's part of a sum: its own, or in later sums of an update what is added to that."""
        own = self.gradients[bucket]
        if self.rounds:
            return torch.empty_like(own)
        resize(own, own.numel())
        return own

    def add_part(self, bucket: int, part: Tensor) -> None:
        """Adds a sum to those before it in this update."""
        if part is not self.gradients[bucket]:
            self.gradients[bucket].add_(part)

    def end_round(self) -> None:
        """Frees the whole gradients, of which the sums are complete."""
        self._reached += self.buckets.marks
        self._never &= {self._own[index] for index in self.buckets.idle}
        self.rounds += 1
        self.buckets.free()

    def end_step(self) -> None:
        """Begins the gradients of the next update."""
        super().end_step()
        self._free_sums()
        self.rounds = 0
        self._reached.zero_()
        self._never = set(self._own)

    def forget_pass(self) -> None:
        """Frees the gradients of a pass that failed, whole ones and sums."""
        super().forget_pass()
        self.buckets.free()

    def _free_sums(self) -> None:
        for part in self.gradients:
            resize(part, 0)

    def _has_gradient(self, index: int) -> bool:
        """Returns whether a backward of this update has reached a parameter, on any replica."""
        if index not in self._never:
            return True
        mark = self._reached[self._own.index(index)]
        return bool(mark.is_meta or mark)


class SharedWeightsStore(SharedGradientsStore):
    """Weights that replicas share as they share gradients: whole only from a gather to the end of their use.

    Args:
        parameters: that the stage trains.
        whole: for each, whether it is stepped whole; it stays whole.
        replica: number of this replica.
        num_replicas: of the stage.
        frozen: further weights of the stage alone, which it does not train.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        whole: Sequence[bool],
        replica: int,
        num_replicas: int,
        frozen: Sequence[nn.Parameter],
    ) -> None:
        self._shards: list[Tensor] = []
        super().__init__(parameters, whole, replica, num_replicas)
        self.gathers = 0
        self._is_released = False
        self._frozen = list(frozen)
        self._frozen_buckets = layout(self._frozen, num_replicas)
        self._frozen_views: list[Tensor] = []
        self._trained_gone = [_without_numbers(parameter) for parameter in self._parameters]
        self._frozen_gone = [_without_numbers(parameter) for parameter in self._frozen]
        given = [parameter.data for parameter in self._frozen]
        self._make_flats()
        for view, weight in zip(self._frozen_views, given, strict=True):
            view.copy_(weight)
        self._shards += [self._part(flat).clone() for flat in self._flats[0][len(self._shards) :]]
        self._free()

    def _make_flats(self) -> None:
        """New memory for whole weights: buckets of those that train, then of the frozen ones."""
        (version,) = self._versions
        data = self._versions[version]
        flats = [torch.zeros(bucket.size, dtype=bucket.dtype, device=self._device) for bucket in self.buckets.buckets]
        self._versions = {version: self._views(flats, data)}
        for index in self._own:
            self.masters[index].data = self._versions[version][index]
        self._frozen_views = list(self._frozen_gone)
        for bucket in self._frozen_buckets:
            flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=self._device)
            flats.append(flat)
            for index, view in zip(bucket.members, bucket.views(flat, self._frozen), strict=True):
                self._frozen_views[index] = view
        self._flats = {version: flats}

    @property
    def _device(self) -> torch.device | None:
        for parameter in (*self._parameters, *self._frozen):
            return parameter.device
        return None

    def _memory_of(self, number: int, flats: Sequence[Tensor]) -> Tensor:
        """This replica's part of a bucket, in memory of its own."""
        shard = super()._memory_of(number, flats).clone()
        self._shards.append(shard)
        return shard

    def kept(self) -> list[Tensor]:
        """Its parts of the weights."""
        return list(self._shards)

    def gather(self, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives whole weights memory; (this replica's part, the whole) of each bucket, which is then to be gathered."""
        self.gathers += 1
        for shard, flat in zip(self._shards, self._flats[version], strict=True):
            resize(flat, flat.numel())
            yield shard, flat
        self.at(version)

    def at(self, version: int) -> None:
        """Makes the parameters those of a version, which is whole."""
        if version != self._current:
            for parameter, view in zip(self._frozen, self._frozen_views, strict=True):
                parameter.data = view
        super().at(version)

    def drop(self, version: int) -> None:
        """Frees whole weights; the parts stay."""
        self._free()

    def forget_pass(self) -> None:
        """Frees the gradients of a pass that failed, and whole weights."""
        super().forget_pass()
        self._free()

    def keep_changes(self) -> None:
        """Copies this replica's part of whole weights, which may have been changed, and frees them.

        Their memory may belong to others by now, such as arrays of NumPy, so it is not used again.
        """
        if self._is_released:
            return
        for shard, flat in zip(self._shards, self._flats[self._current], strict=True):
            shard.copy_(self._part(flat))
        self._make_flats()
        self._free()

    def _free(self) -> None:
        """Frees the memory of whole weights. What is stepped whole stays."""
        (flats,) = self._flats.values()
        for index in self._own:
            self._parameters[index].data = self._trained_gone[index]
        for parameter, gone in zip(self._frozen, self._frozen_gone, strict=True):
            parameter.data = gone
        for flat in flats:
            resize(flat, 0)
        self._current = -1

    def begin_step(self, version: int, in_place: bool) -> None:
        """Prepares pieces and gradients for the optimizer; there is one version, which its parts make."""
        super().begin_step(version, in_place=True)
        del self._versions[version], self._flats[version]

    def rebase(self) -> None:
        """Renumbers the newest version as 0."""
        (newest,) = self._versions
        self._versions = {0: self._versions[newest]}
        self._flats = {0: self._flats[newest]}
        self._current = min(self._current, 0)

    def release(self) -> None:
        """Gives every weight its own memory, if they are whole; the store cannot be used afterwards."""
        super().release()
        for parameter in self._frozen:
            parameter.data = parameter.data.clone()
        self._is_released = True


def _without_numbers(parameter: Tensor) -> Tensor:
    """A tensor of the shape of a weight without its memory, which reads as not a number where its type has that."""
    value = parameter.new_zeros(())
    if value.is_floating_point():
        value.fill_(float("nan"))
    return value.detach().expand(parameter.shape)
