"""Gradients of a stage in flat buckets that are reduced one by one while the backward still runs.

    backward of the stage, last layers first    │ 7 6 5 │ 4 3 2 │ 1 0 │
    a bucket is full: its reduction starts              ▶── bucket 0 ──▶
                                                                ▶── bucket 1 ──▶
    the `reduce` instruction starts the others, and an instruction that needs the gradients waits for all of them

A gradient is a view of its bucket, so nothing is packed before a reduction or unpacked after it. Autograd allocates the
first gradient of an update (nothing is added to zeros); it is moved to its place once, and those of later micro-batches
are added there. Where replicas share gradients, memory is scarce: buckets have none between two sums, and the first
gradient is added to zeros in its place, so that no second copy of it exists.

DDP's reducer is not used: it belongs to one module that runs forward and backward once between two reductions. Here
several micro-batches and versions of the weights are in flight, and the program, not the module, specifies when
gradients are complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.cost.work import bucket_bytes
from pipefit.stage.record_layout import Field, Layout, is_dense, padded

_ALIGN = 16
_GRAIN_BYTES = 64

Launch = Callable[[int, Tensor], None]


class Bucket(NamedTuple):
    """Parameters that are adjacent in one flat tensor.

    Attributes:
        members: indices of the parameters.
        starts: of each, its first element.
        size: elements, divisible by the number of parts.
        dtype: of all of them.
        num_marks: further elements, in the last bucket one for each parameter; see `GradientBuckets.marks`.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    dtype: torch.dtype
    num_marks: int = 0

    def views(self, flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The members' tensors inside a flat one, laid out in memory as the parameters are."""
        return [view_in(flat, start, parameters[index]) for index, start in zip(self.members, self.starts, strict=True)]


def view_in(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of a flat tensor starting at `start`, with the shape and strides of another."""
    if like.is_contiguous() or not is_dense(like):
        return flat[start : start + like.numel()].view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + start)


def in_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a tensor in the order in which `view_in` lays out another one; a view of it where possible."""
    if like.is_contiguous() or not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() == like.stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    view_in(flat, 0, like).copy_(tensor)
    return flat


def layout(parameters: Sequence[Tensor], parts: int = 1) -> list[Bucket]:
    """Buckets of parameters of one type each, the last parameters first, because their gradients come first.

    Args:
        parameters: of a stage.
        parts: every bucket can be split into so many equal ones.
    """
    # A bucket takes no further parameter once it has this size.
    cap_bytes = bucket_bytes(sum(parameter.nbytes for parameter in parameters))
    groups: list[list[int]] = []
    end = 0
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        is_full = end * parameter.element_size() >= cap_bytes
        if not groups or is_full or parameter.dtype != parameters[groups[-1][0]].dtype:
            groups.append([])
            end = 0
        groups[-1].append(index)
        end += padded(parameter.numel(), _ALIGN)
    made = []
    for members in groups:
        sizes = [padded(parameters[index].numel(), _ALIGN) for index in members]
        *starts, end = accumulate(sizes, initial=0)
        size = padded(end, _ALIGN * parts)
        made.append(Bucket(tuple(members), tuple(starts), size, parameters[members[0]].dtype))
    if made and parts == 1:
        made[-1] = made[-1]._replace(num_marks=len(parameters))
    return made


def record_layout(parameters: Sequence[Tensor]) -> tuple[list[Field], Layout]:
    """Places of buckets, and of the gradients in them, in the record of a stage's gradients.

    Args:
        parameters: of a stage that is spilled.
    """
    flats = []
    fields = {}
    position = 0
    for bucket in layout(parameters):
        dtype = bucket.dtype
        flats.append(Field(position, torch.Size([bucket.size + bucket.num_marks]), dtype))
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            fields[index] = Field(position + start * dtype.itemsize, parameters[index].shape, dtype)
        position += padded(flats[-1].num_bytes, _GRAIN_BYTES)
    return flats, Layout.of([field for _, field in sorted(fields.items())], position)


class GradientBuckets:
    """The gradients of the parameters that a stage's replicas sum.

    Args:
        parameters: in the model's order.
        parts: every bucket can be split into so many equal ones.
        spilled: they are in the slot of the stage, which `place_in` sets.
        freed: they have no memory until `hold`.

    Attributes:
        parameters: in the model's order.
        buckets: of the parameters.
        flats: the buckets' memory, kept from update to update.
        marks: for each parameter a number whose reduced value is the number of replicas with a gradient for it. It is
            in the last bucket; with `parts` it is a separate tensor.
        idle: of the update that was finished last, the parameters without a gradient on this rank.
        is_watching: whether the last backward of an update runs.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], parts: int = 1, spilled: bool = False, freed: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.buckets = layout(self.parameters, parts)
        self.flats: list[Tensor] = []
        device = None
        if parameters:
            device = self.parameters[0].device
        self.marks = torch.ones(len(self.parameters), dtype=torch.float64, device=device)
        self._views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self._fields: list[Field] = []
        if spilled:
            self._fields = record_layout(self.parameters)[0]
        else:
            sizes = [(bucket.size + bucket.num_marks, bucket.dtype) for bucket in self.buckets]
            self._place((torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes), freed)
        # Hooks stay: making and removing them for every update takes longer than calling them. They refer to this
        # object weakly, since the user's parameters may outlive it.
        itself = weakref.ref(self)
        for number, bucket in enumerate(self.buckets):
            for index in bucket.members:
                hook = partial(_gradient_added, itself, number, index)
                parameter = self.parameters[index]
                is_training = parameter.requires_grad
                parameter.requires_grad = True  # torch takes no hook of one that is frozen for now
                handle = parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad = is_training
                weakref.finalize(self, handle.remove)
        self.is_watching = False
        self._waiting: list[int] = []
        self._started = 0
        self._adopted = False
        self._is_freed = freed
        # Parameters whose gradients are zeros so far, to which autograd adds.
        self._zeros: set[int] = set()
        self._launch: Launch = _nothing
        self.idle: list[int] = []

    def _place(self, flats: Iterable[Tensor], freed: bool = False) -> None:
        """Places the gradients in flat tensors, which are made one by one where each is freed at once."""
        self.flats = []
        for bucket, flat in zip(self.buckets, flats, strict=True):
            self.flats.append(flat)
            if bucket.num_marks:
                self.marks = flat[bucket.size :]
            for index, view in zip(bucket.members, bucket.views(flat, self.parameters), strict=True):
                self._views[index] = view
            if freed:
                resize(flat, 0)

    def free(self) -> None:
        """Frees the memory of all gradients until `hold`."""
        self._adopted = False
        self._is_freed = True
        self._zeros.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for flat in self.flats:
            resize(flat, 0)

    def forget_pass(self) -> None:
        """Forgets the gradients of a pass that failed: the next first backward moves its own to their places."""
        self._adopted = False
        self._launch = _nothing

    def hold(self) -> None:
        """Gives gradients memory again if they have none: zeros, to which the next backward adds."""
        if not self._is_freed:
            return
        self._is_freed = False
        self._adopted = True
        self._zeros.update(range(len(self.parameters)))
        for flat in self.flats:
            resize(flat, flat.numel())
            flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def place_in(self, record: Tensor) -> None:
        """Places the gradients in a slot, in the order of `record_layout`."""
        self._place([field.of(record) for field in self._fields])

    def adopt(self) -> None:
        """Moves the gradients of an update's first backward to their places, where later ones are added to them."""
        if not self._adopted:
            self._adopted = True
            self._move(range(len(self.parameters)))

    def _move(self, indices: Iterable[int]) -> None:
        places = []
        made = []
        for index in indices:
            parameter = self.parameters[index]
            view = self._views[index]
            grad = parameter.grad
            if grad is not None and grad.is_sparse:
                grad = grad.to_dense()
            # In a slot each gradient is moved to its place when it is made.
            if grad is not None and grad is not view and _place_of(grad) != _place_of(view):
                places.append(view)
                made.append(grad)
                parameter.grad = view
        if made:
            torch._foreach_copy_(places, made)

    def begin(self, launch: Launch) -> None:
        """Begins the reductions of an update; `launch(number, flat)` starts that of a bucket."""
        self._launch = launch
        self._started = 0
        self._waiting = [len(bucket.members) for bucket in self.buckets]

    def watch(self, backward: Callable[[], None]) -> None:
        """Runs the last backward of an update; buckets that it fills are launched meanwhile, in order."""
        self.is_watching = True
        try:
            backward()
        finally:
            self.is_watching = False

    def arrived(self, number: int, index: int) -> None:
        """Counts a gradient of a bucket: it is complete when the last backward runs."""
        self._zeros.discard(index)
        if not self.is_watching:
            return
        self._waiting[number] -= 1
        if self._waiting[number]:
            return
        self._move(self.buckets[number].members)
        # All replicas must launch in one order, regardless of the order in which their gradients arrive.
        while self._started < len(self.flats) and not self._waiting[self._started]:
            if self._started == len(self.flats) - 1:
                self.marks.fill_(1)
            self._start()

    def _start(self) -> None:
        self._launch(self._started, self.flats[self._started])
        self._started += 1

    def finish(self) -> None:
        """Launches the other buckets: those with a parameter that the last backward has not reached."""
        self._adopted = False
        self.idle = []
        self._launch_rest()
        # It keeps what was sent alive.
        self._launch = _nothing

    def _launch_rest(self) -> None:
        if self._started == len(self.flats):
            return
        self._move(range(len(self.parameters)))
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or index in self._zeros:
                self.idle.append(index)
                parameter.grad = self._views[index].zero_()
        self.marks.fill_(1)
        if self.idle:
            self.marks[self.idle] = 0
        while self._started < len(self.flats):
            self._start()


def resize(flat: Tensor, count: int) -> None:
    """Gives a flat tensor memory for so many elements: all, or none. Tensors that are views of it keep their places."""
    flat.untyped_storage().resize_(count * flat.element_size())


def _nothing(number: int, flat: Tensor) -> None:
    """Launches no bucket: no reduction has begun."""


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin: in which storage, and at which of its elements."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _gradient_added(buckets: weakref.ref[GradientBuckets], number: int, index: int, parameter: Tensor) -> None:
    """The hook that autograd calls when it has added to a parameter's gradient."""
    own = buckets()
    if own is not None:
        own.arrived(number, index)
