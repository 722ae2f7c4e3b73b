"""Values that pass between the layers of a model otherwise than as arguments and outputs of its blocks.

A block may leave a tensor in an attribute, a list, a global or a closure, and a later one may read it there:

    block 0 ──► output ──► block 1 ──► output ──► block 2
       └──────► self.parent.kept ───────────────────┘     a channel: on another stage it is not there
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipefit.cutting.tracking import Foreign, InCode, Origin, Tracker, is_innermost, place_in_code, storages_of

_WEIGHT, _AVERAGE = -1, -2
"""In place of a layer's number, origins of parameters, and of running averages of batch norms in training."""

_MOST = 1000
"""Times that a place in the code reads another value, after which it is a loop that waits for the true one."""


Owners = dict[str, set[int]]
"""The layers that use each of some modules, by the paths of the modules."""


class Channel(NamedTuple):
    """A value that passes aside.

    Attributes:
        writer: number of the layer that leaves it.
        reader: number of the layer that takes it.
        why: the reason, in words.
    """

    writer: int
    reader: int
    why: str


class Channels:
    """Follows forwards of a whole model and finds what passes aside.

    Args:
        model: whose forwards are run.
        carried: modules in blocks whose outputs are sent to the end.

    Attributes:
        found: channels within one forward.
        lasting: a tensor of one forward that a later one reads; None: there is none.
        reads: places of the code between layers where Python reads data, with the values read.
        varied: a place of `reads`, and what is read there instead.
        homes: the paths of blocks and other modules with weights, by the ids of their parameters.
        users: the layers that use the weights of each of these modules.
        direct: such a module, and the module in whose forward its weights are used; empty: the code between them.
    """

    def __init__(self, model: nn.Module, carried: Iterable[nn.Module] = ()) -> None:
        self.model = model
        self.tracker = Tracker()
        self._carried = list(carried)
        self.found: dict[tuple[int, int], Channel] = {}
        self.lasting: str | None = None
        self.reads: dict[InCode, Any] = {}
        self.varied: tuple[InCode, Any] | None = None
        self.homes: dict[int, str] = {}
        self.users: Owners = {}
        self.direct: set[tuple[str, str]] = set()
        self._times = 0
        norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
        self._norms = {path: one for path, one in norms.items() if one.training and one.running_mean is not None}
        self._given: list[frozenset[int]] = []
        self._handed: set[int] = set()
        self._parameters: frozenset[int] = frozenset()
        self._batch: frozenset[int] = frozenset()
        self._last: dict[tuple[int, str], tuple[Origin, Any]] = {}
        self.tracker.on_use = self._use
        self.tracker.on_read = self._read
        self.tracker.on_write = self._write

    @contextlib.contextmanager
    def following(self, batch: Any) -> Iterator[None]:
        """The context of one forward.

        Args:
            batch: its arguments.
        """
        run = self.tracker.now.run + 1
        self.tracker.now = Origin(run, 0, "", False)
        parameters = list(self.model.parameters())
        self.tracker.forget(list(self.model.buffers()))
        self.tracker.mark_weights({p: Origin(run, _WEIGHT, self.homes.get(id(p), ""), True) for p in parameters})
        for path, norm in self._norms.items():
            self.tracker.mark([norm.running_mean, norm.running_var], Origin(run, _AVERAGE, path, False))
        self.tracker.mark(batch, self.tracker.now)
        self._parameters = _keys(parameters) | _keys([parameter.data for parameter in parameters])
        self._batch = _keys(batch)
        self._given = []
        self._handed = set()
        with contextlib.ExitStack() as contexts:
            for module in self._carried:
                contexts.enter_context(module.register_forward_hook(lambda _, given, output: self.hand(output)))
            contexts.enter_context(self.tracker.following())
            yield

    @contextlib.contextmanager
    def inside(self, path: str, layer: int, given: Any) -> Iterator[None]:
        """The context of a block or another module with weights.

        Args:
            path: the module's path in the model.
            layer: the number of its layer.
            given: its arguments.
        """
        before = self.tracker.now
        self.tracker.now = Origin(before.run, layer, path, False)
        self._given.append(_keys(given))
        try:
            yield
        finally:
            self._given.pop()
            self.tracker.now = before._replace(layer=layer)

    def is_made(self, leaf: Any) -> bool:
        """Returns whether a tensor depends on weights or on what a block has made or changed."""
        return any(origin.foreign or origin.inside for origin in self.tracker.origins(leaf).values())

    def hand(self, output: Any) -> None:
        """Reports the output of a block or another module with weights."""
        self.tracker.mark(output, self.tracker.now._replace(foreign=True))
        self._handed |= _keys(output)

    def end_blocks(self, layer: int) -> None:
        """Reports that the last layer begins, the code after the blocks."""
        self.tracker.now = self.tracker.now._replace(layer=layer)

    def _use(self, origins: dict[int, Origin]) -> None:
        now = self.tracker.now
        for key, origin in origins.items():
            if origin.run != now.run:
                self.lasting = self.lasting or self._text("reads a tensor that an earlier forward left")
            elif origin.layer == _AVERAGE:
                self._refuse_average(origin.inside)
            elif origin.layer == _WEIGHT:
                self.users.setdefault(origin.inside, set()).add(now.layer)
                if origin.inside and origin.inside != now.inside:
                    self.direct.add((origin.inside, now.inside))
            elif origin.layer == now.layer:
                continue
            elif now.inside and key not in self._given[-1] and (origin.inside or origin.foreign):
                self._add(origin, "uses a tensor of")
            elif not now.inside and origin.inside and key not in self._handed:
                self._add(origin, "uses a tensor of")

    def _refuse_average(self, path: str) -> None:
        """Refuses code that uses the running averages of a batch norm besides the batch norm itself."""
        if not is_innermost(self._norms[path], self.model):
            reader, line = place_in_code(self.model)
            raise Foreign(
                f"{reader} uses the running averages of {path} ({line}), which move once in a step, not with every "
                "micro-batch"
            )

    def _add(self, origin: Origin, verb: str) -> None:
        now = self.tracker.now
        if (origin.layer, now.layer) not in self.found:
            writer = origin.inside or f"the code after layer {origin.layer}"
            why = self._text(f"{verb} {writer}, which did not come as an argument")
            self.found[origin.layer, now.layer] = Channel(origin.layer, now.layer, why)

    def _text(self, what: str) -> str:
        path, line = place_in_code(self.model)
        return f"{self.tracker.now.inside or path} {what} ({line})"

    def _read(self, origins: list[Origin], value: Any) -> Any:
        if self.tracker.now.inside or not isinstance(value, bool | int | float):
            return value
        place = place_in_code(self.model)
        self.reads.setdefault(place, value)
        if self.varied is None or self.varied[0] != place:
            return value
        self._times += 1
        if self._times > _MOST:
            raise Foreign("a loop does not end")
        return self.varied[1]

    def _write(self, key: int) -> None:
        if key in self._batch:
            raise Foreign(self._text("writes into its input, which every stage has: let it change a copy (x.clone())"))
        if key in self._parameters:
            raise Foreign(
                self._text(
                    "writes into its weights in a forward: call the model on a batch before, if they are only "
                    "initialised so, or change them after the optimizer's step"
                )
            )

    @contextlib.contextmanager
    def spying(self) -> Iterator[None]:
        """The context in which attributes that one layer writes and another reads are found, whatever they hold.

        Operations show tensors only; numbers and lists in attributes have no other hook than the class of all modules.
        """
        modules = {id(module): path for path, module in self.model.named_modules()}
        modules_class: Any = nn.Module
        plain_set = modules_class.__setattr__

        def write(module: Any, name: str, value: Any) -> None:
            plain_set(module, name, value)
            if self.tracker.now.inside and id(module) in modules:
                self._last[id(module), name] = self.tracker.now, None

        def read(module: Any, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name[:1] != "_" and id(module) in modules:
                self._look(modules[id(module)], module, name, value)
            return value

        modules_class.__setattr__ = write
        modules_class.__getattribute__ = read
        try:
            yield
        finally:
            modules_class.__setattr__ = plain_set
            del modules_class.__getattribute__
            self._last.clear()

    def _look(self, path: str, module: nn.Module, name: str, value: Any) -> None:
        """Compares who wrote an attribute last, or had a container when its content changed, with who reads it."""
        now = self.tracker.now
        key = id(module), name
        if isinstance(value, list | dict | set | deque):
            content = _content(value)
        else:
            content = None
        writer, before = self._last.get(key, (None, None))
        if content is not None:
            self._last[key] = now, content
        if writer is None or not writer.inside or writer.layer == now.layer:
            return
        if before is None or content != before:
            attribute = f"{path}.{name}".removeprefix(".")
            self._add(writer, f"reads {attribute} of")


def _keys(tree: Any) -> frozenset[int]:
    return frozenset(key for key, _ in storages_of(tree))


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        inside = value.items()
    else:
        inside = value
    return [tuple(map(id, one)) if isinstance(one, tuple) else id(one) for one in list(inside)[:1000]]
