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

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.errors import ModelError
from pipefit.parallel.buckets import Bucket, in_order, layout, resize, view_in
from pipefit.parallel.sharded_weights import ShardedStore
from pipefit.stage.record_layout import absent


class SharedGradientsStore(ShardedStore):
    """Weights of a stage whose whole gradients are freed once they are summed: each replica keeps its part of the sum.

    Args:
        parameters: that the stage trains.
        whole: for each, whether it is stepped whole; its gradient is kept whole, too.
        replica: number of this replica.
        num_replicas: of the stage.
    """

    _frees_gradients = True

    def __init__(
        self, parameters: Sequence[nn.Parameter], whole: Sequence[bool], replica: int, num_replicas: int
    ) -> None:
        super().__init__(parameters, whole, replica, num_replicas)
        self._reached = torch.zeros_like(self.buckets.marks)
        self._never = set(self._own)
        self._free_sums()

    def _gradient_parts(self) -> list[Tensor]:
        """Its parts of sums, in memory of their own: from the end of the first sum of an update to its step."""
        sizes = [(bucket.size // self._num, bucket.dtype) for bucket in self.buckets.buckets]
        return [torch.zeros(size, dtype=dtype, device=self.buckets.marks.device) for size, dtype in sizes]

    def end_sum(self) -> None:
        """Keeps its part of a sum, or adds it to those before it in this update."""
        for own, flat in zip(self.gradients, self.buckets.flats, strict=True):
            if self.rounds:
                own.add_(self._part(flat))
            else:
                resize(own, own.numel())
                own.copy_(self._part(flat))

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


class Home(NamedTuple):
    """The place of a weight among those of a stage.

    Attributes:
        bucket: its number.
        start: first element of the weight in the bucket.
        size: elements of one replica's part of the bucket.
        form: shape and layout of the weight, on the meta device.
    """

    bucket: int
    start: int
    size: int
    form: Tensor

    def part(self, replica: int) -> tuple[int, int]:
        """The first element and the number of elements of a replica's part of the weight."""
        low = min(max(replica * self.size - self.start, 0), self.form.numel())
        high = min(max((replica + 1) * self.size - self.start, 0), self.form.numel())
        return low, high - low


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
        self._homes: dict[int, Home] = {}
        super().__init__(parameters, whole, replica, num_replicas)
        self.gathers = 0
        self._frozen = list(frozen)
        self._flats[0] += [self._placed(bucket, self._frozen) for bucket in layout(self._frozen, num_replicas)]
        self._frozen_views = [parameter.data for parameter in self._frozen]
        self._forget_changes()
        self._free()

    def _forget_changes(self) -> None:
        """Makes new tensors without numbers for the weights in parts, to which nobody has written."""
        trained = [self._parameters[index] for index in self._own]
        self._gone = [(parameter, absent(parameter, parameter.device)) for parameter in (*trained, *self._frozen)]

    @torch.no_grad()
    def _placed(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Keeps this replica's part of the parameters of a bucket; returns a flat tensor without memory for the whole.

        The given memory is let go before there is any other: a stage is built with hardly more than its own.
        """
        members = [parameters[member] for member in bucket.members]
        forms = [torch.empty_like(parameter, device="meta") for parameter in members]
        size = bucket.size // self._num
        shard = torch.zeros(size, dtype=bucket.dtype, device=members[0].device)
        for parameter, form, start in zip(members, forms, bucket.starts, strict=True):
            home = self._homes[id(parameter)] = Home(len(self._shards), start, size, form)
            low, length = home.part(self._replica)
            if length:
                offset = start + low - self._replica * size
                shard[offset : offset + length] = in_order(parameter.data, form)[low : low + length]
        self._shards.append(shard)
        for parameter in members:
            parameter.data = absent(parameter, parameter.device)
        flat = torch.empty(bucket.size, dtype=bucket.dtype, device=shard.device)
        for parameter, form, start in zip(members, forms, bucket.starts, strict=True):
            parameter.data = view_in(flat, start, form)
        resize(flat, 0)
        return flat

    def _memory_of(self, number: int, flats: Sequence[Tensor]) -> Tensor:
        """This replica's part of a bucket, in memory of its own."""
        return self._shards[number]

    def home_of(self, parameter: Tensor) -> Home | None:
        """The place of a weight that is in parts; None: it is whole on every replica."""
        return self._homes.get(id(parameter))

    def part_of(self, parameter: Tensor) -> Tensor:
        """This replica's part of a weight, flat."""
        home = self._homes[id(parameter)]
        low, length = home.part(self._replica)
        offset = home.start + low - self._replica * home.size
        return self._shards[home.bucket][offset : offset + length]

    def kept(self) -> list[Tensor]:
        """Its parts of the weights."""
        return list(self._shards)

    def gather(self, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives whole weights memory; (this replica's part, the whole) of each bucket, which is then to be gathered.

        Raises:
            ModelError: see `check_unchanged`.
        """
        self.check_unchanged()
        self.gathers += 1
        for shard, flat in zip(self._shards, self._flats[version], strict=True):
            resize(flat, flat.numel())
            yield shard, flat
        self.at(version)

    def check_unchanged(self) -> None:
        """Checks that nobody has written to a parameter while it has no numbers.

        Raises:
            ModelError: somebody has.
        """
        if self._homes and any(_is_changed(parameter, gone) for parameter, gone in self._gone):
            raise ModelError(
                "a parameter was changed between two steps, where each replica of its stage has only a part of it "
                '(shard="weights"), so the change would be lost: change weights with load_state_dict, or use '
                'shard="gradients"'
            )

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
        """Frees the gradients of a pass that failed, and whole weights, of which other replicas have gathered more."""
        super().forget_pass()
        self.gathers = 0
        self._forget_changes()
        self._free()

    @contextmanager
    def overwritten(self) -> Iterator[None]:
        """The context, between programs, in which whole weights have memory to be written; each replica keeps its part.

        Nothing is gathered: what is not written is whole on no replica, and stays as it is. After an error all stays.
        """
        self._forget_changes()
        (version,) = self._flats
        places = []
        for shard, flat in zip(self._shards, self._flats[version], strict=True):
            resize(flat, flat.numel())
            places.append(self._part(flat).copy_(shard))
        self.at(version)
        try:
            yield
            for shard, place in zip(self._shards, places, strict=True):
                shard.copy_(place)
        finally:
            self._free()

    def _free(self) -> None:
        """Frees the memory of whole weights. What is stepped whole stays."""
        for parameter, gone in self._gone:
            parameter.data = gone
        (flats,) = self._flats.values()
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
        self._homes.clear()


def _is_changed(parameter: Tensor, gone: Tensor) -> bool:
    """Returns whether a parameter is not `gone` any more, or has got numbers, which is not looked up on a GPU."""
    if parameter.data_ptr() != gone.data_ptr():
        return True
    if gone.device.type != "cpu" or not gone.is_floating_point() or not gone.numel():
        return False
    return not math.isnan(gone.as_strided((), ()).item())
