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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.cutting.exported import flow_of
from pipefit.cutting.flow import Flow, modules_of, num_bytes
from pipefit.cutting.lines import by_lines, by_weights, crossings, found_lines, named_lines, weighty
from pipefit.cutting.own import Arguments
from pipefit.cutting.shell import CutLayer, Enter, Payload, entering, node_at
from pipefit.errors import ModelError
from pipefit.stage.opened import Rest
from pipefit.stage.split import NamedLayer

_RECURRENT = {torch.ops.aten.lstm, torch.ops.aten.gru, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu}
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


class Segment(NamedTuple):
    """The operations of a layer.

    Attributes:
        run: from its arguments to the values that leave it.
        sources: of each argument, from the layer's weights, the leaves of the batch, and the values that enter.
        is_recurrent: it has an operation of `nn.LSTM` or the like.
    """

    run: fx.GraphModule
    sources: Sequence[Callable[[nn.Module, Sequence[Any], Sequence[Any]], Any]]
    is_recurrent: bool = False

    @classmethod
    def of(cls, flow: Flow, entering: Sequence[fx.Node], nodes: set[fx.Node], leaving: Sequence[Any]) -> Segment:
        """The segment of some nodes.

        Args:
            flow: of the whole model.
            entering: nodes of earlier layers.
            nodes: those computed here, and placeholders.
            leaving: nodes or plain values.
        """
        graph, env = fx.Graph(), {}
        sources: dict[fx.Node, Any] = {node: lambda w, i, v, k=k: v[k] for k, node in enumerate(entering)}
        sources |= {node: lambda w, i, v, k=k: i[k] for k, node in enumerate(flow.inputs) if node in nodes}
        for node, (name, *others) in flow.state.items():
            # A batch norm has several names: its module is called as a whole.
            get = attrgetter(name.rpartition(".")[0] if others else name)
            if node in nodes:
                sources |= {node: lambda w, i, v, get=get: get(w)}
        sources |= {node: lambda w, i, v, c=value: c for node, value in flow.constants.items() if node in nodes}
        for node in sources:
            env[node] = graph.placeholder(node.name)
        for node in entering:
            if flow.writing(node) & nodes:  # not into a leaf of the stage's own graph
                env[node] = graph.call_function(torch.ops.aten.clone.default, (env[node],))
        for node in flow.nodes:
            if node in nodes:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = {}
        graph.output(fx.node.map_arg(tuple(leaving), env.__getitem__))
        is_recurrent = any(getattr(node.target, "overloadpacket", None) in _RECURRENT for node in graph.nodes)
        return cls(fx.GraphModule(nn.Module(), graph), list(sources.values()), is_recurrent)


class Trace(NamedTuple):
    """A forward in segments, the structure of its output, whether it is for other leaves, and writes into its own."""

    segments: list[Segment]
    structure: pytree.TreeSpec | Rest
    accepts: Callable[[Sequence[Any]], bool]
    overwrites: bool = False


@dataclass
class Traced:
    """A traced model with its lines; takes the place of a `Shell`.

    Attributes:
        model: the code, without weights.
        arguments: from a batch to the positional and keyword arguments of the model.
        result: from the output of the model to what the loss gets.
        training: the mode.
        labels: of the layers.
        weights: of each layer the names of its parameters and buffers.
        holders: of each layer the parameters and buffers, under the model's own names.
        runners: of the segments of each layer.
        known: the operations of the first trace with their layers.
        written: names of the parameters and buffers that a forward writes into.
        traces: by mode, type of the weights and kind of the batch.
        shared, spine: empty; a `Shell` has such modules.
    """

    model: nn.Module
    arguments: Arguments
    result: Callable[[Any], Any]
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
        copied.traces, copied.holders = self.traces, copy.deepcopy(self.holders, memo)
        return copied

    @property
    def num_layers(self) -> int:
        """The number of segments."""
        return len(self.weights)

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""
        self.training = mode

    @property
    def overwrites(self) -> bool:
        """Whether the model writes into the batch; the segments write into copies."""
        return any(trace.overwrites for alike in self.traces.values() for trace in alike)

    def block(self, number: int) -> nn.Module:
        """The module that `torch.compile` and replays take for a layer."""
        return self.runners[number]

    def run(self, first: int, last: int, payload: Any, enter: Enter = lambda layer: None) -> Any:
        """Runs some consecutive layers; see `Shell.run`."""
        begin = entering(first, payload)
        args, kwargs = self.arguments(begin.batch)
        inputs, values = pytree.tree_leaves((args, kwargs)), begin.values
        trace = self._trace(args, kwargs, self._converted(first))
        for number in range(first, last + 1):
            enter(number)
            segment, weights = trace.segments[number], self.holders[number]
            given = [source(weights, inputs, values) for source in segment.sources]
            values = list(segment.run(*given) if segment.is_recurrent else self.runners[number](segment.run, *given))
        if last < self.num_layers - 1:
            return Payload(begin.batch, values, [])._asdict()
        rest = trace.structure
        return self.result(rest.closed(values) if isinstance(rest, Rest) else pytree.tree_unflatten(values, rest))

    def _converted(self, number: int) -> torch.dtype | None:
        """The type that a layer's floating weights were converted to since the cut; None: they were not."""
        floating = ((name, p) for name, p in self.holders[number].named_parameters() if p.is_floating_point())
        kinds = ((p.dtype, self.model.get_parameter(name).dtype) for name, p in floating)
        now, before = next(kinds, (None, None))
        if now == before:
            return None
        return now

    def _trace(self, args: Any, kwargs: Any, dtype: torch.dtype | None = None, flow: Flow | None = None) -> Trace:
        """The trace of the mode for some arguments: one that is there, or a new one."""
        inputs, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in inputs)
        alike = self.traces.setdefault((self.training, dtype, repr(structure), kinds), [])
        found = next((trace for trace in alike if trace.accepts(inputs)), None)
        if found is None:
            flow = flow or self._flow(args, kwargs, dtype)
            self.written |= flow.state_of([node for node in flow.state if flow.storages[node] & flow.kept])
            if list(self.known) == [node.name for node in flow.computed]:
                layers = {node: self.known[node.name] for node in flow.computed}
            else:
                layers = by_weights(flow, self.weights)
            entering, segments = crossings(flow, layers, self.num_layers), []
            for number, leaving in enumerate([*entering[1:], flow.outputs]):
                here = flow.free.union(node for node in flow.computed if layers[node] == number)
                needed = flow.needed([*leaving, *(flow.effects & here)], here.__contains__)
                names = flow.state_of(needed)
                if self.holders and not names <= self.weights[number]:
                    raise ModelError(f"this batch needs {min(names - self.weights[number])} elsewhere than the example")
                self.weights[number] |= names
                nodes = (needed & here) | needed.difference(flow.nodes)
                segments.append(Segment.of(flow, entering[number], nodes, leaving))
            found = Trace(segments, flow.structure, flow.accepts, flow.overwrites)
            alike.append(found)
        return found

    def _flow(self, args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> Flow:
        return flow_of(self.model, args, kwargs, None if self.training == self.model.training else self.training, dtype)

    def choose(self, example: Any, cuts: Sequence[str] | None) -> tuple[tuple[float, int], ...]:
        """Chooses the lines, and with them which layer has which weights.

        Args:
            example: a batch.
            cuts: paths of modules to cut before; None: where little crosses.

        Returns:
            (bytes, number of tensors) that cross each line.

        Raises:
            ModelError: there is no graph, or no line.
        """
        hooked = [path for path, module in self.model.named_modules() if _has_backward_hooks(module)]
        if hooked:
            raise ModelError(f"{hooked[0]} has a backward hook, which its graph would not call: remove it for training")
        args, kwargs = self.arguments(example)
        flow = self._flow(args, kwargs)
        if cuts is None:
            named = {}
            lines = found_lines(flow)
        else:
            named = named_lines(flow, cuts)
            lines = list(named)
        if not lines:
            raise ModelError("no two operations with weights follow each other with only tensors in between")
        layers = by_lines(flow, lines)
        self.known = {node.name: layer for node, layer in layers.items()}
        self.weights = [set() for _ in range(len(lines) + 1)]
        firsts = {layers[node]: node for node in reversed(weighty(flow))}
        for number, line in enumerate([-1, *lines]):
            path = named.get(line) or (modules_of(firsts[number]) or [""])[-1]
            path = path or min(flow.state_of(firsts[number].all_input_nodes))
            times = sum(label.partition(" ")[0] == path for label in self.labels)
            self.labels.append(f"{path} ({times + 1})" if times else path)
        self.runners = [Runner(label) for label in self.labels]
        self._trace(args, kwargs, flow=flow)
        self.training = not self.training
        with contextlib.suppress(ModelError):  # raised again by who needs the other mode
            self._trace(args, kwargs)
        self.training = not self.training
        for number in range(self.num_layers):
            self.weights[number] |= self._tables()
        return tuple((sum(map(num_bytes, nodes)), len(nodes)) for nodes in crossings(flow, layers, self.num_layers)[1:])

    def _tables(self) -> set[str]:
        """The buffers that are not saved, such as tables of positions: any layer may need them for other batches."""
        return {
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        } - self.written

    def hold(self, model: nn.Module) -> tuple[NamedLayer, ...]:
        """The layers, with a model's parameters and buffers; the modules whose tensors one layer uses are shared."""
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors = dict(named)
        held = [{id(tensors[name]) for name in names} for names in self.weights]
        held[0] |= {id(tensor) for tensor in tensors.values()}.difference(*held)  # what nothing uses
        owners: dict[int, list[int]] = defaultdict(list)
        for number, mine in enumerate(held):
            for tensor in mine:
                owners[tensor].append(number)
        self.holders = [nn.Module() for _ in held]
        norms: list[dict[int, nn.Module]] = [{} for _ in held]
        for path, module in model.named_modules(remove_duplicate=False):
            for number in sorted({number for tensor in _tensors(module) for number in owners[id(tensor)]}):
                _place(self.holders[number], path, module, held[number], norms[number])
        return tuple(
            NamedLayer(k, "", CutLayer(self, k, self.holders[k]), label) for k, label in enumerate(self.labels)
        )


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _tensors(module: nn.Module) -> list[Tensor]:
    """A module's own parameters and buffers."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _place(root: nn.Module, path: str, module: nn.Module, mine: set[int], norms: dict[int, nn.Module]) -> None:
    """Puts a module into a layer that has tensors of it, or a bare one in its place.

    Args:
        root: holds the layer's modules.
        path: the module's in its model.
        module: of the model.
        mine: ids of the layer's tensors.
        norms: the layer's batch norms without children, by the id of the model's own.
    """
    has = [id(tensor) in mine for tensor in _tensors(module)]
    parent, _, name = path.rpartition(".")
    if all(has) and path and not module._modules:
        node_at(root, parent)._modules[name] = module
        return
    if isinstance(module, _BatchNorm) and id(module._buffers["running_mean"]) in mine:
        node_at(root, parent)._modules[name] = norms.setdefault(id(module), _childless(module))
    node = node_at(root, path)
    node._non_persistent_buffers_set = module._non_persistent_buffers_set
    for kind in ("_parameters", "_buffers"):
        every = module.__dict__[kind]
        if all(has):
            node.__dict__[kind] = every
        else:
            node.__dict__[kind] = {n: t for n, t in every.items() if id(t) in mine}


def _childless(module: nn.Module) -> nn.Module:
    """A module of the same class with the same tensors, but without children, which may be another layer's."""
    kind = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__, _modules={})
    return made
