"""The origin of every tensor of a forward: by which operations it was made, not by which values it has.

    stage run     stand-ins and parameters that are stood in for are foreign; so is what is computed from them
    whole run     every tensor has the run, layer and module that made it

Values can be equal by chance, as a mask that is False in the example; origins cannot.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.stage.instead import Instead

_OF_SHAPES = {
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
                 "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "is_same_size", "sym_size",
                 "sym_numel", "sym_stride", "sym_storage_offset", "_assert_tensor_metadata")
}  # fmt: skip
"""Operations that use only shape, type and device of their input."""

_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Marks of operations whose result, or its size, Python reads from memory."""
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
"""Functions that read a tensor's memory without an operation."""

_FOR_PEOPLE = {Tensor.__repr__, Tensor.__format__}

_WITHOUT_TENSORS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout))
"""Types of the arguments of operations that hold no tensors."""


Storages = list[tuple[int, Any]]
"""Storages with their ids."""

Places = tuple[tuple[int, str], ...]
"""Places and names of arguments."""

InCode = tuple[str, str]
"""The path of a module whose code runs, and the line, for people."""


class Origin(NamedTuple):
    """The place in a forward at which a tensor was made.

    Attributes:
        run: number of the forward.
        layer: number of the layer.
        inside: path of the block or other module with weights; empty: code between them.
        foreign: it depends on weights or on earlier layers, not on the batch only.
    """

    run: int
    layer: int
    inside: str
    foreign: bool


class Foreign(BaseException):
    """Code would need a value that it cannot have; not an `Exception`, so that no handler of the model catches it."""


class Tracker(TorchDispatchMode):
    """Follows tensors through operations.

    Attributes:
        known: the origins of storages, with weak references, which keep their ids from being used again; a parameter
            has its own, since several may be views of one storage.
        now: the origin of what is made now.
        on_use: called before an operation with the origins of its arguments by the ids of their storages.
        on_read: called as Python reads a tensor whose origin is known, with a place in the code; returns what is read.
        on_write: called before an operation writes into a storage, with the storage's id.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Any, Origin]] = {}
        self._weights: set[int] = set()
        self.now = Origin(0, 0, "", False)
        self.on_use: Callable[[dict[int, Origin]], None] = lambda origins: None
        self.on_read: Callable[[list[Origin], Any], Any] = lambda origins, value: value
        self.on_write: Callable[[int], None] = lambda storage: None
        self._is_quiet = False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """The context in which tensors are followed."""
        global _followed_by
        before, _followed_by = _followed_by, self
        try:
            with Instead(_READS | _FOR_PEOPLE, self._direct), self:
                yield
        finally:
            _followed_by = before

    def mark(self, tree: Any, origin: Origin) -> None:
        """Gives the tensors of a tree an origin."""
        for key, storage in storages_of(tree):
            if key in self._weights:
                continue
            holder = storage
            if key in self.known:
                holder, _ = self.known[key]
            elif isinstance(storage, UntypedStorage):
                holder = StorageWeakRef(storage)
            self.known[key] = holder, origin

    def mark_weights(self, origins: Mapping[nn.Parameter, Origin]) -> None:
        """Gives parameters an origin, which their views have too unless parameters share the storage."""
        storages = {parameter: parameter.untyped_storage() for parameter in origins}
        times = Counter(storage._cdata for storage in storages.values())
        self._weights = set(times)
        for parameter, origin in origins.items():
            storage = storages[parameter]
            self.known[id(parameter)] = parameter, origin
            if times[storage._cdata] == 1:
                self.known[storage._cdata] = StorageWeakRef(storage), origin
            else:
                self.known.pop(storage._cdata, None)

    def forget(self, tree: Any) -> None:
        """Takes the origins of the tensors of a tree away: they are given."""
        for key, _ in storages_of(tree):
            self.known.pop(key, None)

    def origins(self, tree: Any) -> dict[int, Origin]:
        """The known origins of the tensors of a tree, by the ids of their storages."""
        return {key: self.known[key][1] for key, _ in storages_of(tree) if key in self.known}

    def is_foreign(self, tree: Any) -> bool:
        """Returns whether a tensor of a tree is foreign."""
        return any(origin.foreign for origin in self.origins(tree).values())

    def read(self, tree: Any, value: Any) -> Any:
        """Reports that Python reads tensors, and returns what it gets."""
        found = list(self.origins(tree).values())
        if self._is_quiet or not found:
            return value
        return self.on_read(found, value)

    def _direct(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Reports a function that reads memory without an operation, unless it is for people."""
        if func in _FOR_PEOPLE:
            with self.quiet():
                return func(*args, **kwargs)
        return self.read(args[:1], func(*args, **kwargs))

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The context in which reads are not reported."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        written = []
        for place, name in operation.writes:
            if place < len(args):
                written.append(args[place])
            else:
                written.append(kwargs.get(name))
        for key, _ in storages_of(written):
            self.on_write(key)
        used = {}
        if not operation.is_of_shapes:
            used = self.origins((args, kwargs))
        if used:
            self.on_use(used)
        result = func(*args, **kwargs)
        if used:
            foreign = any(origin.foreign for origin in used.values())
            self.mark([result, written], self.now._replace(foreign=foreign))
        if operation.is_read or (operation.is_indexing and _takes_mask(args)):
            return self.read((args, kwargs), result)
        return result


_followed_by: Tracker | None = None


def stood_in(tree: Any) -> Any:
    """A tree of stand-ins as it is; who follows tensors learns that they are foreign."""
    if _followed_by is not None:
        _followed_by.mark(tree, _followed_by.now._replace(foreign=True))
    return tree


def arrived(tensor: Tensor) -> None:
    """Reports that a stand-in got the value that it stands for."""
    if _followed_by is not None and tensor.nbytes == tensor.untyped_storage().nbytes():
        _followed_by.forget(tensor)


def place_in_code(model: nn.Module) -> InCode:
    """The path of the module of a model whose code runs now, and the line, for people."""
    return _place(model, traceback.walk_stack(sys._getframe(1)))


def is_innermost(module: nn.Module, model: nn.Module) -> bool:
    """Returns whether a module is the one of a model whose forward runs now."""
    known: set[nn.Module] = set()
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        found = frame.f_locals.get("self")
        if found is module:
            return True
        if isinstance(found, nn.Module):
            # Only now: a model may have thousands of modules, and a norm is called many times.
            known = known or set(model.modules())
            if found in known:
                return False
    return False


def place_of(problem: BaseException, model: nn.Module) -> InCode:
    """The path of the module of a model whose code raised an error, and the line, for people."""
    frames = list(traceback.walk_tb(problem.__traceback__))
    return _place(model, reversed(frames))


def described(problem: BaseException, model: nn.Module) -> str:
    """An error of a model's code with its place, for people."""
    path, line = place_of(problem, model)
    return f"{type(problem).__name__} in {path} ({line}): {problem}"


def _place(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> InCode:
    """The first frame of the user's code, and the first module of the model at or after it."""
    paths = {module: path for path, module in model.named_modules()}
    kind = type(model).__name__
    text = ""
    for frame, number in frames:
        if not text and not _is_of_torch(frame):
            file = frame.f_code.co_filename
            code = linecache.getline(file, number).strip()
            text = f"line {number} of {Path(file).name}: `{code}`"
        module = frame.f_locals.get("self")
        if text and isinstance(module, nn.Module) and module in paths:
            return paths[module] or kind, text
    return kind, text


def _is_of_torch(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("torch", "pipefit")


def storages_of(tree: Any) -> Storages:
    """The storages of the tensors of a tree, with ids; of a parameter, or a tensor without a storage, itself."""
    found: Storages = []
    _gather_storages(tree, found)
    return found


def _gather_storages(tree: Any, found: Storages) -> None:
    kind = type(tree)
    if kind in _WITHOUT_TENSORS:
        return
    if isinstance(tree, list | tuple):
        for inner in tree:
            _gather_storages(inner, found)
    elif kind is dict:
        for inner in tree.values():
            _gather_storages(inner, found)
    elif kind is not Tensor and isinstance(tree, nn.Parameter):  # the second question is slow
        found.append((id(tree), tree))
    elif isinstance(tree, Tensor):
        try:
            storage = tree.untyped_storage()
            found.append((storage._cdata, storage))
        except (NotImplementedError, RuntimeError):  # such as sparse tensors
            found.append((id(tree), tree))
    elif not pytree.tree_is_leaf(tree):
        _gather_storages(pytree.tree_leaves(tree), found)


class _Operation(NamedTuple):
    """Facts about an operation.

    Attributes:
        is_of_shapes: it uses only shape, type and device of its input.
        is_read: Python gets data of it, or a size that depends on data.
        is_indexing: it is a read if it gets a mask.
        writes: places and names of the arguments that it writes into.
    """

    is_of_shapes: bool = False
    is_read: bool = False
    is_indexing: bool = False
    writes: Places = ()


@functools.cache
def _operation(func: Any) -> _Operation:
    if not isinstance(func, OpOverload):
        return _Operation()
    name = func._schema.name
    is_indexing = name in ("aten::index", "aten::_unsafe_index")
    is_read = not is_indexing and not _OF_DATA.isdisjoint(func.tags)
    return _Operation(name in _OF_SHAPES, is_read, is_indexing, writes_of(func))


def writes_of(operation: OpOverload) -> Places:
    """The places and names of the arguments that an operation writes into, by its schema."""
    found = []
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append((place, argument.name))
    return tuple(found)


def _takes_mask(args: Any) -> bool:
    """Returns whether there is a mask among the places that an indexing operation gets."""
    places = pytree.tree_leaves(args[1:])
    kinds = {one.dtype for one in places if isinstance(one, Tensor)}
    return not kinds.isdisjoint((torch.bool, torch.uint8))
