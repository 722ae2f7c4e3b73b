"""Bytes of the tensors that live, as an allocator without blocks would count them; on the meta device also messages."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.profiling.clock import Clock


class _Form(NamedTuple):
    """A tensor of the meta device without its identity."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make on devices of one type until they are freed.

    Attributes:
        live_bytes: of the storages that live now.
        peak_bytes: the most so far.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._kind = kind
        self._known: set[int] = set()

    def add(self, tensors: Iterable[Any]) -> None:
        """Counts the storages of tensors that are not counted yet."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type != self._kind or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known.add(key)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts its results."""
        result = func(*args, **(kwargs or {}))
        self.add(pytree.tree_leaves(result))
        return result


class Growth(Clock):
    """A clock of bytes: between two of its marks lies the most by which memory grew after the first.

    Args:
        count: that is active while marks are made.
        device: of the tensors.
    """

    def __init__(self, count: LiveBytes, device: torch.device) -> None:
        super().__init__(device)
        self._count = count
        self._live: list[int] = []
        self._most: list[int] = []

    def mark(self) -> int:
        """The number of the mark; the peak begins anew."""
        count = self._count
        self._most.append(count.peak_bytes)
        self._live.append(count.live_bytes)
        count.peak_bytes = count.live_bytes
        return len(self._live) - 1

    def between(self, start: int, end: int) -> float:
        """Bytes, at least 0, from one mark to another."""
        first = self._live[start]
        return max(self._most[start + 1 : end + 1], default=first) - first


class MetaCount(LiveBytes):
    """Counts on the meta device, and counts the calls of collectives.

    An operation that only makes new tensors runs once for each form of its arguments: many of torch's take milliseconds
    to find the shapes of their results.

    Attributes:
        calls: of operations of `torch.distributed` by name, such as send and allreduce_.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.calls: Counter[str] = Counter()
        self._forms: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, or makes the results that it would give, and counts them."""
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__] += 1
            return func(*args, **kwargs)
        result = self._result(func, args, kwargs)
        self.add(pytree.tree_leaves(result))
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = _key_of(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._forms:
            result = func(*args, **kwargs)
            leaves, tree = pytree.tree_flatten(result)
            if all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                self._forms[key] = tree, *map(_form_of, leaves)
            return result
        tree, *forms = self._forms[key]
        return pytree.tree_unflatten([form.made() for form in forms], tree)


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation with the forms of its arguments; None: it changes or returns one of them, or works on others."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info for one in schema.returns):
        return None
    parts: list[Any] = [func]
    for leaf in pytree.tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor):
            parts.append((type(leaf), leaf))
        elif leaf.is_meta:
            parts.append(_form_of(leaf))
        else:
            return None
    try:
        hash(tuple(parts))
    except TypeError:
        return None
    return tuple(parts)


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)
