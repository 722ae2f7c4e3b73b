"""Python objects that layers of different stages share, or the loss, in a sequence that no example has proved.

    layer 1 ──► box.value = h          stage 0        in another process, or for another micro-batch,
    layer 4 ──► h + box.value          stage 1        box.value is another one

What one layer leaves in a list, a dict, an object or a variable that a layer of another stage has too is seen by
comparing it before and after the first forwards. Ordinary layers share nothing that can change, and have no cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipefit.cutting.objects import Named, data_of, named_parts
from pipefit.cutting.outer import Variable, can_change, outer_variables
from pipefit.cutting.states import OF_TORCH, with_loss
from pipefit.errors import ModelError
from pipefit.spec.plan import Partition
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import Stage

_FORWARDS = 2
"""Forwards of each layer that are watched: the second one is another micro-batch's, or another step's."""

_DEPTH = 6
_MOST = 10_000
_PLAIN = bool | int | float | complex | str | bytes


class Place(NamedTuple):
    """A place that holds values.

    Attributes:
        name: a name for messages.
        content: gives the values that it holds now.
        is_buffer: it is a buffer of one of the layer's own modules.
        is_log: the code that has it only appends to it.
    """

    name: str
    content: Callable[[], list[Any]]
    is_buffer: bool = False
    is_log: bool = False


class Shared(NamedTuple):
    """A place that two layers of different stages have, or a layer and the loss.

    Attributes:
        mine: the place in the layer that runs.
        other: the other layer, or the loss, for people.
        theirs: the place there.
    """

    mine: Place
    other: str
    theirs: Place

    def content(self) -> list[Any]:
        """The values that it holds now."""
        return [*self.mine.content(), *self.theirs.content()]


def watch_shared(
    layers: Sequence[NamedLayer], loss: Any, partition: Partition, held: Sequence[Mapping[int, Stage]]
) -> None:
    """Lets the first forwards of layers fail that change what a layer of another stage has, too, or the loss.

    Args:
        layers: all of the model, in order.
        loss: of its output.
        partition: the layers of each stage.
        held: the stages of each rank of this process, by index.
    """
    if len(partition.stages) == 1:
        return
    places = {layer.index: _places_of(layer.name, layer.module) for layer in layers}
    of_loss = _places_of("loss", _holder(loss))
    for stages in held:
        for index, stage in stages.items():
            own = partition.stages[index].layers
            others = {"the loss": of_loss}
            for layer in layers:
                if layer.index not in own:
                    others[f"layer {layer.name} of another stage"] = places[layer.index]
            for layer in stage.layers:
                # A copy of a layer, as replicas have it, shares nothing with the others.
                if layer.module is layers[layer.index].module:
                    shared = _shared(places[layer.index], others)
                    if shared:
                        stage.hooks += _Watch(layer, shared).hooks


def _shared(mine: Mapping[Any, Place], others: Mapping[str, Mapping[Any, Place]]) -> list[Shared]:
    """The places that a layer has in common with others, each once."""
    found: dict[Any, Shared] = {}
    for other, theirs in others.items():
        for key in mine.keys() & theirs.keys():
            if not (mine[key].is_buffer and theirs[key].is_buffer) and not theirs[key].is_log:
                found.setdefault(key, Shared(mine[key], other, theirs[key]))
    return list(found.values())


class _Watch:
    """Compares what a layer shares before and after its first forwards."""

    def __init__(self, layer: NamedLayer, shared: Sequence[Shared]) -> None:
        self._layer = layer
        self._shared = shared
        self._before: list[list[Any]] = []
        self._left = _FORWARDS
        begin = layer.module.register_forward_pre_hook(self._begin, prepend=True)
        end = layer.module.register_forward_hook(self._end)
        self.hooks = [begin, end]

    def __deepcopy__(self, memo: Any) -> _Watch:
        """Itself: what layers share is not copied with one of them."""
        return self

    def _begin(self, module: nn.Module, given: Any) -> None:
        self._before = [shared.content() for shared in self._shared]

    def _end(self, module: nn.Module, given: Any, output: Any) -> None:
        for shared, before in zip(self._shared, self._before, strict=True):
            after = shared.content()
            if not _is_same(before, after):
                changed = f"{shared.mine.name}{_changed_key(before, after)}"
                raise ModelError(
                    f"layer {self._layer.name} changes {changed}, which {shared.other} has, too, in "
                    f"{shared.theirs.name}: there, it is another one. Return the value as part of the output, or make "
                    "one layer of both; if nothing there needs it, pass example= so that it is proved"
                )
        self._left -= 1
        if not self._left:
            self._before = []
            self._shared = []
            for hook in self.hooks:
                hook.remove()


def _holder(loss: Any) -> Any:
    """A module that has a loss, and the object of which it is a method."""
    holder = with_loss(loss)
    holder.__dict__["owner"] = getattr(loss, "__self__", None)
    return holder


def _places_of(name: str, root: nn.Module) -> dict[Any, Place]:
    """The places that the code of a layer has, by keys that are the same for all who have them."""
    found: dict[Any, Place] = {}
    modules = list(root.named_modules(prefix=name))
    for path, module in modules:
        found[id(module)] = Place(path, partial(_attributes, module))
        for name, buffer in module.named_buffers(path, recurse=False):
            found[id(buffer)] = Place(name, partial(_content, buffer), is_buffer=True)
    for path, module in modules:
        for name, value in _named_attributes(module):
            _walk(f"{path}.{name}", value, found)
    logs: dict[Any, Place] = {}
    for variable in outer_variables(root, modules=True):
        places = found
        if not variable.is_read:
            places = logs
        places[variable.key] = Place(variable.name, partial(_value, variable))
        _walk(variable.name, variable.get(), places)
    return {key: place._replace(is_log=True) for key, place in logs.items()} | found


def _value(variable: Variable) -> list[Any]:
    return [variable.get()]


def _named_attributes(module: nn.Module) -> list[Named]:
    return [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]


def _attributes(module: nn.Module) -> list[Any]:
    return _parts(_named_attributes(module))


def _parts(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [part for pair in list(pairs) for part in pair]


def _walk(name: str, value: Any, found: dict[Any, Place], depth: int = 0) -> None:
    """Adds the places that a value holds."""
    if id(value) in found or depth > _DEPTH or len(found) > _MOST:
        return
    if isinstance(value, nn.Module) or can_change(value):
        found[id(value)] = Place(name, partial(_content, value))
    elif not isinstance(value, tuple):
        return
    for inner, one in _named_inside(name, value):
        _walk(inner, one, found, depth + 1)


def _named_inside(name: str, value: Any) -> Iterator[Named]:
    """The values that a value holds, with their names."""
    if isinstance(value, nn.Module):
        for key, one in _attributes_and_buffers(value):
            yield f"{name}.{key}", one
    elif not isinstance(value, Tensor):
        yield from named_parts(name, value)


def _attributes_and_buffers(module: nn.Module) -> list[Named]:
    return [*_named_attributes(module), *module._buffers.items(), *module._modules.items()]


def _content(value: Any) -> list[Any]:
    """The values that a place holds: the same ones, not copies, unless they are data."""
    if isinstance(value, Tensor):
        return [value._version]
    data = data_of(value)
    if data is not None:
        return [data]
    if isinstance(value, dict):
        return _parts(value.items())
    if isinstance(value, list | set | deque):
        return list(value)
    if isinstance(value, nn.Module):
        return _parts(_attributes_and_buffers(value))
    return _parts(vars(value).items())


def _changed_key(before: Sequence[Any], after: Sequence[Any]) -> str:
    """The key or attribute of the first value that is another one, for people; empty: it has none."""
    for place, (old, new) in enumerate(zip(before, after, strict=False)):
        if not _is_same([old], [new]):
            key = before[place - 1]
            if place % 2 and isinstance(key, str):
                return f" ({key})"
            return ""
    return ""


def _is_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    if len(before) != len(after):
        return False
    return all(a is b or _are_equal(a, b) for a, b in zip(before, after, strict=True))


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _is_same(a, b)
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return a == b or (a != a and b != b)
    return False
