"""The weights of a stage on a rank: the interface of every store, and the store that is resident and whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ModelError, PlanError
from pipefit.parallel.buckets import GradientBuckets
from pipefit.stage.half_copies import HalfCopies

GIVEN_LATER = (
    "a stage's optimizer was given another weight by add_param_group, which can be neither saved nor moved: let a "
    "layer of the model hold it, and make another Pipeline"
)


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a weight that this replica steps.

    Attributes:
        index: of the parameter among the stage's.
        start: its first element, in the weight's memory order.
        stop: the element after its last.
        bucket: number of the bucket that holds the weight.
        offset: of its first element in this replica's part of the bucket.
        master: the optimizer's parameter.
    """

    index: int
    start: int
    stop: int
    bucket: int
    offset: int
    master: nn.Parameter

    def of(self, part: Tensor) -> Tensor:
        """Its elements in this replica's part of the bucket."""
        return part[self.offset : self.offset + self.stop - self.start]


class Store(Protocol):
    """Weights, gradients and the optimizer's parameters of a stage, wherever they are. By default it is stepped whole.

        WeightStore     resident and whole
        ShardedStore    resident; of each bucket of weights this replica steps one part
        SharedGradientsStore, SharedWeightsStore
                        resident; of gradients, or also of weights, this replica keeps one part
        SpilledStore    on the host or on disk, and on the device while the stage is in a slot

    Attributes:
        masters: the parameters that the optimizer is made for.
        pieces: parts of weights that this replica steps; none where weights are stepped whole.
        known_states: places of the states that the optimizer has made, in records; none where no record holds states.
        rounds: sums of gradients of this update, of parts of its micro-batches, that are complete.
    """

    masters: list[nn.Parameter]
    pieces: list[Piece]
    known_states: set[int]
    rounds: int = 0

    def at(self, version: int) -> None:
        """Makes a version of the weights the live one."""

    def begin_step(self, version: int, in_place: bool) -> None:
        """Prepares masters and gradients for the optimizer, which turns `version` into `version` + 1."""

    def end_step(self) -> None:
        """Frees the gradients."""

    def forget_pass(self) -> None:
        """Frees the gradients of a pass that failed."""
        self.end_step()

    def drop(self, version: int) -> None:
        """Frees a version."""

    def rebase(self) -> None:
        """Renumbers the newest version as 0: a program has ended, and the next one counts from 0."""

    def take_changes(self) -> None:
        """Takes the values of parameters to which other memory was assigned between two programs (`p.data = …`).

        Raises:
            ModelError: they have another shape or type.
        """
        return

    def release(self) -> None:
        """Gives every weight its own memory, where it has none; the store cannot be used afterwards."""
        return

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Gets the optimizer, fresh and made for the masters, and changes what it steps where that is needed."""
        return

    def steps_whole(self, index: int) -> bool:
        """Returns whether the optimizer steps a parameter, by its place among the masters, as a whole."""
        return True

    def groups(self, optimizer: Optimizer) -> list[list[int]]:
        """The places of the masters of each group of the optimizer."""
        return places_of(self.masters, optimizer)

    def make_buckets(self, untied: Sequence[nn.Parameter]) -> GradientBuckets:
        """The buckets in which its gradients are reduced over replicas.

        Args:
            untied: parameters that no other stage shares; the gradients of the others are reduced with their ties.
        """

    def own_part(self, bucket: int) -> Tensor | None:
        """This replica's part of a bucket, into which the sum is written; None: each replica gets the whole sum."""
        return None

    def end_sum(self) -> None:
        """Takes this replica's parts of a sum, which are where `own_part` has named them."""
        return

    def part_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(the parameter's place, the gradient) of each piece that this replica steps."""
        return iter(())

    def weight_parts(self, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(the part that this replica has stepped, the whole) of each bucket of a version whose parts are gathered."""
        return iter(())

    def kept(self) -> list[Tensor]:
        """Tensors that it keeps between programs besides the parameters: its parts of what replicas share."""
        return []

    def present(self, optim: bool = False, change: bool = False) -> AbstractContextManager[None]:
        """The context, between programs, in which the stage is on the device.

        Args:
            optim: also its optimizer's states.
            change: changes are kept, also those of the optimizer's states.
        """
        return nullcontext()

    def overwritten(self) -> AbstractContextManager[None]:
        """The context, between programs, in which all weights can be written."""
        return nullcontext()

    def saving(self, halves: HalfCopies) -> AbstractContextManager[None]:
        """The context of a forward whose weights, with their half copies, may be elsewhere in its backward."""
        return nullcontext()


class WeightStore(Store):
    """`at(version)` points the live parameters at the tensors of a version; nothing is copied to read one.

    The optimizer works on masters, separate parameters that share the newest version's memory. Autograd would treat a
    step on the live parameters as a change of tensors saved by micro-batches in flight, and refuse their backward.

    Attributes:
        masters: the parameters that the optimizer gets.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._versions: dict[int, list[Tensor]] = {0: [parameter.data for parameter in self._parameters]}
        self._current = 0
        self.masters = [nn.Parameter(parameter.data) for parameter in self._parameters]
        self.pieces: list[Piece] = []
        self.known_states: set[int] = set()

    def at(self, version: int) -> None:
        """Makes a version the live one."""
        if version != self._current:
            for parameter, data in zip(self._parameters, self._versions[version], strict=True):
                parameter.data = data
            self._current = version

    @torch.no_grad()
    def take_changes(self) -> None:
        """Copies parameters that have other memory now, into the memory that the optimizer changes."""
        if self._current not in self._versions:
            return  # they are nowhere whole
        for parameter, data in zip(self._parameters, self._versions[self._current], strict=True):
            if parameter.data_ptr() != data.data_ptr():
                if (parameter.shape, parameter.dtype) != (data.shape, data.dtype):
                    raise ModelError(
                        f"a weight is {parameter.dtype} of shape {list(parameter.shape)} now, and had another type or "
                        "shape when the Pipeline was made: make another Pipeline after such a change"
                    )
                data.copy_(parameter)
                parameter.data = data

    @torch.no_grad()
    def begin_step(self, version: int, in_place: bool) -> None:
        """Prepares masters and gradients for the optimizer, which turns `version` into `version` + 1.

        Args:
            version: from which the step starts.
            in_place: `version` is no longer needed, so its tensors are overwritten; else they are copied once.
        """
        data = self._versions[version]
        if not in_place:
            data = self._copied(version)
            for master, tensor in zip(self.masters, data, strict=True):
                master.data = tensor
        self._versions[version + 1] = data
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = parameter.grad
        if in_place and self._current == version:
            # While draining, the live parameters may still point at an older version: then they stay there.
            self._current = version + 1

    def _copied(self, version: int) -> list[Tensor]:
        """Tensors for the version after one that is still needed, for the optimizer to change."""
        return [tensor.clone() for tensor in self._versions[version]]

    def end_step(self) -> None:
        """Frees the gradients."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = parameter.grad = None

    def drop(self, version: int) -> None:
        """Frees a version."""
        del self._versions[version]

    def rebase(self) -> None:
        """Renumbers the newest version as 0: a program has ended, and the next one counts from 0."""
        newest = max(self._versions)
        self.at(newest)
        self._versions = {0: self._versions[newest]}
        self._current = 0

    def make_buckets(self, untied: Sequence[nn.Parameter]) -> GradientBuckets:
        """New buckets for the gradients."""
        return GradientBuckets(untied)


def places_of(masters: Sequence[nn.Parameter], optimizer: Optimizer) -> list[list[int]]:
    """The places, among some masters, of the parameters of each group of an optimizer.

    Raises:
        ModelError: it was given another parameter later.
    """
    place = {id(master): index for index, master in enumerate(masters)}
    try:
        return [[place[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ModelError(GIVEN_LATER) from None


def refuse_hooks(optimizer: Optimizer) -> None:
    """Refuses an optimizer of parts of weights whose hooks would take these for whole ones.

    Raises:
        PlanError: it has hooks of its step.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise PlanError(
            "an optimizer with hooks of its step cannot be sharded: they know whole weights, and it steps parts of "
            'them; clip by clip_norm, or do not shard the optimizer (shard="none", tensor=1)'
        )
