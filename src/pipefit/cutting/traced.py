"""A model's forward as segments of its traced graph, one for each layer, for models without a list of blocks.

A segment takes what crosses the line before it, the batch, which every stage has, and the weights of its layer:

    layer 0      batch ─► conv ─► pool ─┬──────────────┐ skip
    ------------------------------------│--------------│---- a line: two tensors cross
    layer 1                             └─► conv ─► up ─► cat ─► output

Values that need no weights, such as a mask of the batch, are computed in each layer that uses them. The graph holds no
weights: they are looked up at each run. Batches that need another graph, such as sequences of another length where the
code depends on it, are traced when they come.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.cutting.exported import flow_of
from pipefit.cutting.flow import Flow, modules_of, num_bytes
from pipefit.cutting.lines import Layers, by_lines, by_weights, crossings, found_lines, named_lines, weighty
from pipefit.cutting.own import Arguments, Leaves, Paths, Result
from pipefit.cutting.shell import CutLayer, Enter, Payload, entering, node_at, share_tensors
from pipefit.errors import ModelError
from pipefit.stage.opened import Rest
from pipefit.stage.split import NamedLayer, own_tensors

_LIBRARY = torch.ops.aten
_RECURRENT = {_LIBRARY.lstm, _LIBRARY.gru, _LIBRARY.rnn_tanh, _LIBRARY.rnn_relu}
"""Operations whose dropout draws other numbers when it is compiled."""


class Runner(nn.Module):
    """Runs the segments of one layer, of whichever trace, as the module that `torch.compile` takes."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def forward(self, run: fx.GraphModule, *args: Any) -> Any:
        """The values that leave the layer."""
        return run(*args)

    def extra_repr(self) -> str:
        """The label, so that each layer is a kind of its own."""
        return self.label


_WEIGHTS, _INPUTS, _VALUES = range(3)
"""The sources of a segment's arguments: the layer's weights, the leaves of the batch, and the values that enter."""


Source = tuple[int, Callable[[Any], Any]]
"""The number of an argument's source, and a function that takes it from there."""


class Segment(NamedTuple):
    """The operations of a layer.

    Attributes:
        run: computes the values that leave it from its arguments.
        sources: the number of each argument's source, and a function that takes it from there.
        is_recurrent: it has an operation of `nn.LSTM` or the like.
    """

    run: fx.GraphModule
    sources: Sequence[Source]
    is_recurrent: bool = False

    @classmethod
    def of(cls, flow: Flow, entering: Sequence[fx.Node], nodes: set[fx.Node], leaving: Sequence[Any]) -> Segment:
        """The segment of some nodes.

        Args:
            flow: the whole model's operations.
            entering: nodes of earlier layers.
            nodes: those computed here, and placeholders.
            leaving: nodes or plain values.
        """
        sources: dict[fx.Node, Source] = {}
        for place, node in enumerate(entering):
            sources[node] = _VALUES, itemgetter(place)
        for place, node in enumerate(flow.inputs):
            if node in nodes:
                sources[node] = _INPUTS, itemgetter(place)
        for node, (name, *others) in flow.state.items():
            if node in nodes:
                if others:  # A batch norm has several names: its module is called as a whole.
                    name = name.rpartition(".")[0]
                sources[node] = _WEIGHTS, attrgetter(name)
        for node, value in flow.constants.items():
            if node in nodes:
                sources[node] = _WEIGHTS, partial(_constant, value)
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in sources}
        for node in entering:
            if flow.writing(node) & nodes:  # not into a leaf of the stage's own graph
                env[node] = graph.call_function(_LIBRARY.clone.default, (env[node],))
        for node in flow.nodes:
            if node in nodes:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = {}
        graph.output(fx.node.map_arg(tuple(leaving), env.__getitem__))
        packets = {getattr(node.target, "overloadpacket", None) for node in graph.nodes}
        is_recurrent = not packets.isdisjoint(_RECURRENT)
        return cls(fx.GraphModule(nn.Module(), graph), list(sources.values()), is_recurrent)


def _constant(value: Any, source: Any) -> Any:
    return value


class Trace(NamedTuple):
    """A forward in segments, the structure of its output, whether it is for other leaves, and writes into its own."""

    segments: list[Segment]
    structure: pytree.TreeSpec | Rest
    accepts: Callable[[Leaves], bool]
    overwrites: bool = False


def _kind(leaf: Any) -> Any:
    """The part of a batch's leaf that a trace depends on."""
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype, leaf.device
    return leaf


@dataclass
class Traced:
    """A traced model with its lines; takes the place of a `Shell`.

    Attributes:
        model: the code, without weights.
        arguments: makes the positional and keyword arguments of the model from a batch.
        result: makes the input of the loss from the output of the model.
        training: the mode.
        labels: a name for each layer.
        weights: the names of each layer's parameters and buffers.
        holders: each layer's parameters and buffers, under the model's own names.
        runners: a module for each layer that runs its segments.
        known: the operations of the first trace with their layers.
        written: names of the parameters and buffers that a forward writes into.
        traces: all traces, by mode, type of the weights and kind of the batch.
        shared, spine: empty; a `Shell` has such modules.
    """

    model: nn.Module
    arguments: Arguments
    result: Result
    training: bool
    labels: list[str] = field(default_factory=list)
    weights: list[set[str]] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)
    runners: list[Runner] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    traces: dict[Any, list[Trace]] = field(default_factory=dict)
    shared: Sequence[nn.Module] = ()
    spine: Sequence[nn.Module] = ()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the traces, which can be made again."""
        return self.__dict__ | {"traces": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        """A copy with its own weights and the same graphs."""
        memo[id(self)] = copied = copy.copy(self)
        copied.traces = self.traces
        copied.holders = copy.deepcopy(self.holders, memo)
        return copied

    @property
    def num_layers(self) -> int:
        """The number of segments."""
        return len(self.weights)

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""
        self.training = mode

    def with_modes(self) -> list[Traced]:
        """Everything that has a mode of its own, besides the modules of its layers."""
        return [self]

    @property
    def overwrites(self) -> bool:
        """Whether the model writes into the batch; the segments write into copies."""
        every = chain.from_iterable(self.traces.values())
        return any(trace.overwrites for trace in every)

    def block(self, number: int) -> nn.Module:
        """The module that `torch.compile` and replays take for a layer."""
        return self.runners[number]

    def run(self, first: int, last: int, payload: Any, enter: Enter = lambda layer: None) -> Any:
        """Runs some consecutive layers; see `Shell.run`."""
        begin = entering(first, payload)
        args, kwargs = self.arguments(begin.batch)
        inputs = pytree.tree_leaves((args, kwargs))
        values = begin.values
        trace = self._trace(args, kwargs, self._converted(first))
        for number in range(first, last + 1):
            enter(number)
            run, sources, is_recurrent = trace.segments[number]
            tables = (self.holders[number], inputs, values)
            given = [take(tables[table]) for table, take in sources]
            if is_recurrent:
                values = list(run(*given))
            else:
                values = list(self.runners[number](run, *given))
        if last < self.num_layers - 1:
            return Payload(begin.batch, values, [])._asdict()
        if isinstance(trace.structure, Rest):
            output = trace.structure.closed(values)
        else:
            output = pytree.tree_unflatten(values, trace.structure)
        return self.result(output)

    def _converted(self, number: int) -> torch.dtype | None:
        """The type that a layer's floating weights were converted to since the cut; None: they were not."""
        for name, parameter in self.holders[number].named_parameters():
            if parameter.is_floating_point():
                if parameter.dtype == self.model.get_parameter(name).dtype:
                    return None
                return parameter.dtype
        return None

    def _trace(self, args: Any, kwargs: Any, dtype: torch.dtype | None = None, flow: Flow | None = None) -> Trace:
        """The trace of the mode for some arguments: one that is there, or a new one."""
        inputs, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple(map(_kind, inputs))
        alike = self.traces.setdefault((self.training, dtype, repr(structure), kinds), [])
        for trace in alike:
            if trace.accepts(inputs):
                return trace
        trace = self._new_trace(flow or self._flow(args, kwargs, dtype))
        alike.append(trace)
        return trace

    def _new_trace(self, flow: Flow) -> Trace:
        written = [node for node in flow.state if flow.storages[node] & flow.kept]
        self.written |= flow.state_of(written)
        if list(self.known) == [node.name for node in flow.computed]:
            layers = dict(zip(flow.computed, self.known.values(), strict=True))
        else:
            layers = by_weights(flow, self.weights)
        entering = crossings(flow, layers, self.num_layers)
        segments = []
        for number, leaving in enumerate([*entering[1:], flow.outputs]):
            own = {node for node, layer in layers.items() if layer == number}
            here = flow.free | own
            effects = flow.effects & here
            needed = flow.needed([*leaving, *effects], here.__contains__)
            names = flow.state_of(needed)
            missing = names - self.weights[number]
            if self.holders and missing:
                raise ModelError(f"this batch needs {min(missing)} elsewhere than the example")
            self.weights[number] |= names
            nodes = (needed & here) | needed.difference(flow.nodes)
            segment = Segment.of(flow, entering[number], nodes, leaving)
            segments.append(segment)
        return Trace(segments, flow.structure, flow.accepts, flow.overwrites)

    def _flow(self, args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> Flow:
        training = None
        if self.training != self.model.training:
            training = self.training
        return flow_of(self.model, args, kwargs, training, dtype)

    def choose(self, example: Any, cuts: Paths | None) -> tuple[tuple[float, int], ...]:
        """Chooses the lines, and with them which layer has which weights.

        Args:
            example: a batch.
            cuts: paths of modules to cut before; None: where little crosses.

        Returns:
            (bytes, number of tensors) that cross each line.

        Raises:
            ModelError: there is no graph, or no line.
        """
        for path, module in self.model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise ModelError(f"{path} has a backward hook, which its graph would not call: remove it for training")
        args, kwargs = self.arguments(example)
        flow = self._flow(args, kwargs)
        named = {}
        if cuts is None:
            lines = found_lines(flow)
        else:
            named = named_lines(flow, cuts)
            lines = list(named)
        if not lines:
            raise ModelError("no two operations with weights follow each other with only tensors in between")
        layers = by_lines(flow, lines)
        self.known = {node.name: layer for node, layer in layers.items()}
        self.weights = [set() for _ in range(len(lines) + 1)]
        self.labels = _labels(flow, layers, [named.get(line, "") for line in (-1, *lines)])
        self.runners = list(map(Runner, self.labels))
        self._trace(args, kwargs, flow=flow)
        self.training = not self.training
        with contextlib.suppress(ModelError):  # raised again by who needs the other mode
            self._trace(args, kwargs)
        self.training = not self.training
        tables = self._tables()
        for names in self.weights:
            names |= tables
        sizes = []
        for nodes in crossings(flow, layers, self.num_layers)[1:]:
            size = sum(map(num_bytes, nodes))
            sizes.append((size, len(nodes)))
        return tuple(sizes)

    def _tables(self) -> set[str]:
        """The buffers that are not saved, such as tables of positions: any layer may need them for other batches."""
        found = set()
        for path, module in self.model.named_modules():
            for name in module._non_persistent_buffers_set:
                if module._buffers.get(name) is not None:
                    found.add(f"{path}.{name}".removeprefix("."))
        return found - self.written

    def hold(self, model: nn.Module) -> tuple[NamedLayer, ...]:
        """The layers, with a model's parameters and buffers; the modules whose tensors one layer uses are shared."""
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        ids = {name: id(tensor) for name, tensor in named}
        held = [{ids[name] for name in names} for names in self.weights]
        unused = set(ids.values()).difference(*held)
        held[0] |= unused
        self.holders = []
        layers = []
        for number, label in enumerate(self.labels):
            holder = nn.Module()
            norms: dict[nn.Module, nn.Module] = {}
            for path, module in model.named_modules(remove_duplicate=False):
                if not held[number].isdisjoint(map(id, own_tensors(module))):
                    _place(holder, path, module, held[number], norms)
            self.holders.append(holder)
            layers.append(NamedLayer(number, "", CutLayer(self, number, holder), label))
        return tuple(layers)


def _labels(flow: Flow, layers: Layers, given: Paths) -> list[str]:
    """Names of the layers: those given, else the modules, or weights, of the first operation with weights.

    Args:
        flow: the whole model's operations.
        layers: the layer of each operation.
        given: a name for each layer; empty: none.
    """
    firsts: dict[int, fx.Node] = {}
    for node in weighty(flow):
        firsts.setdefault(layers[node], node)
    paths = list(given)
    for number, first in firsts.items():
        inner = modules_of(first)
        if not paths[number] and inner:
            paths[number] = inner[-1]
        if not paths[number]:
            paths[number] = min(flow.state_of(first.all_input_nodes))
    labels = []
    for number, path in enumerate(paths):
        times = paths[:number].count(path)
        if times:
            path = f"{path} ({times + 1})"
        labels.append(path)
    return labels


def _place(root: nn.Module, path: str, module: nn.Module, mine: set[int], norms: dict[nn.Module, nn.Module]) -> None:
    """Puts a module into a layer that has tensors of it, or a bare one in its place.

    Args:
        root: holds the layer's modules.
        path: the module's in its model.
        module: the model's module.
        mine: ids of the layer's tensors.
        norms: the layer's batch norms without children, by the model's own.
    """
    has_all = mine.issuperset(map(id, own_tensors(module)))
    parent, _, name = path.rpartition(".")
    if has_all and path and not module._modules:
        node_at(root, parent)._modules[name] = module
        return
    if isinstance(module, _BatchNorm) and id(module.running_mean) in mine:
        if module not in norms:
            norms[module] = _childless(module)
        node_at(root, parent)._modules[name] = norms[module]
    node = node_at(root, path)
    share_tensors(node, module)
    if not has_all:
        for kind in ("_parameters", "_buffers"):
            every = module.__dict__[kind]
            node.__dict__[kind] = {name: tensor for name, tensor in every.items() if id(tensor) in mine}


def _childless(module: nn.Module) -> nn.Module:
    """A module of the same class with the same tensors, but without children, which may be another layer's."""
    kind = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__, _modules={})
    return made
