"""A model's forward as segments of its traced graph, one for each layer, for models without a list of blocks.

A segment takes what crosses the line before it, the batch, which every stage has, and the weights of its layer:

    layer 0      batch ─► conv ─► pool ─┬──────────────┐ skip
    ------------------------------------│--------------│---- a line: two tensors cross
    layer 1                             └─► conv ─► up ─► cat ─► output

What needs no weights, such as a mask of the batch, is computed in each layer that uses it. The graph holds no weights:
they are looked up at each run. Batches that need another graph, such as sequences of another length where the model's
code depends on it, are traced when they come.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.exported import Flow, flow_of, modules_of, num_bytes
from pipefit.cutting.lines import Layers, by_lines, by_weights, crossings, found_lines, named_lines, weighty
from pipefit.cutting.shell import CutLayer, Enter, Payload, node_at
from pipefit.errors import ModelError
from pipefit.stage.split import NamedLayer


class _Part(NamedTuple):
    """A layer's part of a flow: the nodes that enter and leave it, those that it computes, and all that these need."""

    entering: list[fx.Node]
    leaving: Sequence[Any]
    nodes: list[fx.Node]
    needed: set[fx.Node]


def _parts(flow: Flow, layers: Layers, num_layers: int) -> list[_Part]:
    entering = crossings(flow, layers, num_layers)
    parts = []
    for number, leaving in enumerate([*entering[1:], flow.outputs]):
        here = {node for node in flow.nodes if node in flow.free or layers.get(node) == number}
        effects = [node for node in flow.effects if node in here and node not in flow.free]
        needed = flow.needed([*leaving, *effects], here.__contains__)
        nodes = [node for node in flow.nodes if node in needed & here]
        parts.append(_Part(entering[number], leaving, nodes, needed))
    return parts


class Segment(NamedTuple):
    """The operations of a layer.

    Attributes:
        run: from its arguments to what leaves it.
        given: what each argument is: "value" or "input" with its number, "state" with its name, or "constant".
    """

    run: fx.GraphModule
    given: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, flow: Flow, part: _Part) -> Segment:
        """The segment of a part."""
        graph, env = fx.Graph(), {}
        sources = [(node, ("value", place)) for place, node in enumerate(part.entering)]
        sources += [(node, ("input", place)) for place, node in enumerate(flow.inputs) if node in part.needed]
        sources += [(node, ("state", names)) for node, names in flow.state.items() if node in part.needed]
        sources += [(node, ("constant", value)) for node, value in flow.constants.items() if node in part.needed]
        for node, _ in sources:
            env[node] = graph.placeholder(node.name)
        computed = set(part.nodes)
        for node in part.entering:
            # A leaf of the stage's own graph must not be written into.
            if any(computed.intersection(flow.writers.get(storage, ())) for storage in flow.storages[node]):
                env[node] = graph.call_function(torch.ops.aten.clone.default, (env[node],))
        for node in part.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {}
        graph.output(fx.node.map_arg(tuple(part.leaving), env.__getitem__))
        return cls(fx.GraphModule(nn.Module(), graph), tuple(source for _, source in sources))

    def __call__(self, holder: nn.Module, inputs: Sequence[Any], values: Sequence[Tensor]) -> list[Any]:
        """What leaves the layer."""
        given: list[Any] = []
        for kind, key in self.given:
            if kind == "state":
                # Several names are those of a batch norm, which computes by itself.
                path = key[0].split(".")[: None if len(key) == 1 else -1]
                given.append(functools.reduce(getattr, path, holder))
            else:
                given.append(values[key] if kind == "value" else inputs[key] if kind == "input" else key)
        return list(self.run(*given))


class Trace(NamedTuple):
    """A forward in segments.

    Attributes:
        segments: of each layer.
        structure: of the output.
        forms: the leaves of a batch, as in the export.
        guards: raises an `AssertionError` for leaves that the segments are not for.
    """

    segments: list[Segment]
    structure: pytree.TreeSpec
    forms: list[Any]
    guards: Callable[..., None]

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether the segments are for a batch with these leaves."""
        for form, leaf in zip(self.forms, leaves, strict=True):
            if isinstance(form, Tensor):
                # A dimension of 1 is a program of its own, for instance in broadcasting.
                sizes = zip(form.shape, leaf.shape, strict=True)
                if any(not isinstance(known, int) and size < 2 for known, size in sizes):
                    return False
        try:
            self.guards(*leaves)
        except AssertionError:
            return False
        return True


@dataclass
class Traced:
    """A traced model with its lines; takes the place of a `Shell`.

    Attributes:
        model: hollow: the code, without weights.
        arguments: from a batch to the positional and keyword arguments of the model.
        result: from the output of the model to what the loss gets.
        training: the mode.
        labels: of the layers.
        weights: of each layer the names of its parameters and buffers.
        holders: of each layer the parameters and buffers, under the model's own names.
        known: by mode, the operations of the first trace with their layers.
        traces: by mode, type of the weights and kind of the batch.
    """

    model: nn.Module
    arguments: Callable[[Any], tuple[tuple[Any, ...], Mapping[str, Any]]]
    result: Callable[[Any], Any]
    training: bool
    labels: list[str] = field(default_factory=list)
    weights: list[set[str]] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)
    known: dict[bool, dict[str, int]] = field(default_factory=dict)
    traces: dict[Any, list[Trace]] = field(default_factory=dict)
    shared: Sequence[nn.Module] = ()
    spine: Sequence[nn.Module] = ()

    def __getstate__(self) -> dict[str, Any]:
        """All but what can be traced again."""
        return self.__dict__ | {"traces": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        """With weights of its own; the graphs have none."""
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

    def run(self, first: int, last: int, payload: Any, enter: Enter = lambda layer: None) -> Any:
        """Runs some consecutive layers; see `Shell.run`."""
        begin = Payload(payload, [], []) if first == 0 else Payload(**payload)
        args, kwargs = self.arguments(begin.batch)
        inputs, values = pytree.tree_leaves((args, kwargs)), begin.values
        trace = self._trace_of(args, kwargs, self._converted(first))
        for number in range(first, last + 1):
            enter(number)
            values = trace.segments[number](self.holders[number], inputs, values)
        if last < self.num_layers - 1:
            return Payload(begin.batch, values, [])._asdict()
        return self.result(pytree.tree_unflatten(values, trace.structure))

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
        args, kwargs = self.arguments(example)
        flow = self._flow(args, kwargs, None)
        lines = found_lines(flow) if cuts is None else named_lines(flow, cuts)
        if not lines:
            raise ModelError("no two operations with weights follow each other with only tensors in between")
        layers = by_lines(flow, lines)
        self.known[self.training] = {node.name: layer for node, layer in layers.items()}
        self.weights = [set() for _ in range(len(lines) + 1)]
        firsts = {layers[node]: node for node in reversed(weighty(flow))}
        paths = [(modules_of(firsts[k]) or [""])[-1] or flow.state_of(firsts[k])[0] for k in range(self.num_layers)]
        self.labels = [
            f"{path} ({paths[:k].count(path) + 1})" if path in paths[:k] else path for k, path in enumerate(paths)
        ]
        self._alike(args, kwargs, None).append(self._segmented(flow))
        self.training = not self.training
        with contextlib.suppress(ModelError):  # raised again by who needs the other mode
            self._trace_of(args, kwargs, None)
        self.training = not self.training
        return tuple((sum(map(num_bytes, nodes)), len(nodes)) for nodes in crossings(flow, layers, self.num_layers)[1:])

    def hold(self, model: nn.Module) -> tuple[NamedLayer, ...]:
        """The layers, with the parameters and buffers of a model; where one has all of a module's they share it."""
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors = dict(named)
        held = [{id(tensors[name]) for name in names} for names in self.weights]
        held[0] |= {id(tensor) for tensor in tensors.values()}.difference(*held)  # what nothing uses
        self.holders = [nn.Module() for _ in held]
        for root, mine in zip(self.holders, held, strict=True):
            for path, module in model.named_modules(remove_duplicate=False):
                own = [
                    tensor
                    for kind in (module._parameters, module._buffers)
                    for tensor in kind.values()
                    if tensor is not None
                ]
                if not any(id(tensor) in mine for tensor in own):
                    continue
                if all(id(tensor) in mine for tensor in own):
                    parent, _, name = path.rpartition(".")
                    if path and not module._modules:
                        node_at(root, parent)._modules[name] = module
                    else:
                        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                            node_at(root, path).__dict__[name] = module.__dict__[name]
                    continue
                for kind in ("_parameters", "_buffers"):
                    found = {name: value for name, value in module.__dict__[kind].items() if id(value) in mine}
                    node_at(root, path).__dict__[kind] |= found
                node_at(root, path)._non_persistent_buffers_set |= module._non_persistent_buffers_set
        return tuple(
            NamedLayer(k, "", CutLayer(self, k, self.holders[k]), label) for k, label in enumerate(self.labels)
        )

    def _flow(self, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Flow:
        mode = None if self.training == self.model.training else self.training
        return flow_of(self.model, args, kwargs, mode, dtype)

    def _alike(self, args: Any, kwargs: Any, dtype: torch.dtype | None) -> list[Trace]:
        """The traces for batches of the same kind, whatever their shapes."""
        inputs, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in inputs)
        return self.traces.setdefault((self.training, dtype, repr(structure), kinds), [])

    def _trace_of(self, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Trace:
        alike, inputs = self._alike(args, kwargs, dtype), pytree.tree_leaves((args, kwargs))
        if not any(trace.accepts(inputs) for trace in alike):
            alike.insert(0, self._segmented(self._flow(args, kwargs, dtype)))
        return next(trace for trace in alike if trace.accepts(inputs))

    def _segmented(self, flow: Flow) -> Trace:
        """The segments of a flow: those of the cut, or, for other operations, as the weights lie."""
        known = self.known.get(self.training, {})
        if list(known) == [node.name for node in flow.computed]:
            layers: Layers = {node: known[node.name] for node in flow.computed}
        else:
            layers = by_weights(flow, self.weights)
        segments = []
        for number, part in enumerate(_parts(flow, layers, self.num_layers)):
            names = {name for node in part.needed for name in flow.state.get(node, ())}
            if self.holders and not names <= self.weights[number]:
                raise ModelError(f"it needs {min(names - self.weights[number])} in another layer than its example")
            self.weights[number] |= names
            segments.append(Segment.of(flow, part))
        return Trace(segments, flow.structure, [node.meta.get("val") for node in flow.inputs], flow.guards)

    def _converted(self, number: int) -> torch.dtype | None:
        """The type that a layer's floating weights were converted to since the cut; None: they were not."""
        for name, tensor in self.holders[number].named_parameters():
            if tensor.is_floating_point():
                return None if tensor.dtype == self.model.get_parameter(name).dtype else tensor.dtype
        return None
