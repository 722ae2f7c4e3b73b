"""The operations of a forward, with what each of them reads and writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from pipefit.cutting.own import Leaves
from pipefit.cutting.tracking import writes_of
from pipefit.stage.batchnorm import normalised
from pipefit.stage.opened import Rest

_SLOW = ("mm", "matmul", "linear", "conv", "einsum", "fft", "attention", "lstm", "gru", "rnn")
"""Parts of the names of operations that are not done twice."""


@dataclass(frozen=True, eq=False)
class Flow:
    """The operations of a forward.

    Attributes:
        nodes: the operations, in order.
        inputs: the leaves of the batch.
        state: the names of the parameters and buffers that a placeholder stands for: one tensor, or a batch norm's.
        constants: what else the operations take.
        parameters: the placeholders of parameters.
        outputs: nodes or plain values.
        structure: the output's structure.
        accepts: whether the leaves of another batch have shapes that the graph is for.
        overwrites: the forward writes into the batch; the graph writes into copies.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    state: Mapping[fx.Node, tuple[str, ...]]
    constants: Mapping[fx.Node, Any]
    parameters: list[fx.Node]
    outputs: Leaves
    structure: pytree.TreeSpec | Rest
    accepts: Callable[[Leaves], bool]
    overwrites: bool = False

    @cached_property
    def places(self) -> dict[fx.Node, int]:
        """The place of each node in their order."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def storages(self) -> dict[fx.Node, frozenset[int]]:
        """The memory of each node's tensors, as in the export."""
        every = chain(self.inputs, self.state, self.constants, self.nodes)
        return {node: frozenset(memory_of(node)) for node in every}

    @cached_property
    def writers(self) -> dict[int, list[fx.Node]]:
        """The nodes that write into each memory, in order."""
        found = defaultdict(list)
        for node in self.nodes:
            for storage in {storage for given in written_by(node) for storage in self.storages[given]}:
                found[storage].append(node)
        return dict(found)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The memory of parameters, buffers and constants that is written into."""
        every = chain.from_iterable(self.storages[node] for node in chain(self.state, self.constants))
        return frozenset(every) & self.writers.keys()

    @cached_property
    def free(self) -> set[fx.Node]:
        """Nodes that need no parameter, no random numbers and little time: done again wherever they are used."""
        tainted = self.kept.union(*(self.storages[node] for node in self.parameters))
        while True:
            found: set[fx.Node] = set()
            for node in self.nodes:
                before = [given for given in node.all_input_nodes if given.op == "call_function"]
                if found.issuperset(before) and not self.touched(node) & tainted and _is_quick(node):
                    found.add(node)
            written = {storage for storage, nodes in self.writers.items() if not found.issuperset(nodes)}
            if written <= tainted:
                return found
            tainted |= written

    @cached_property
    def computed(self) -> list[fx.Node]:
        """The nodes that an output or a buffer needs and that are not free."""
        live = self.needed([*self.outputs, *self.effects])
        return [node for node in self.nodes if node in live and node not in self.free]

    @cached_property
    def effects(self) -> set[fx.Node]:
        """The nodes that write into parameters, buffers and constants."""
        return {node for storage in self.kept for node in self.writers[storage]}

    def touched(self, node: fx.Node) -> frozenset[int]:
        """The memory that a node reads, writes or gives."""
        return self.storages[node].union(*(self.storages[given] for given in node.all_input_nodes))

    def writing(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that write into the memory that a node gives."""
        return {writer for storage in self.storages[node] for writer in self.writers.get(storage, ())}

    def needed(self, wanted: Sequence[Any], here: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
        """The nodes that some values need, those included.

        Args:
            wanted: nodes; other values need nothing.
            here: whether a node is computed here; what others give is there already.
        """
        found = set()
        rest = [node for node in wanted if isinstance(node, fx.Node)]
        while rest:
            node = rest.pop()
            if node not in found:
                found.add(node)
                rest += filter(here, self.writing(node))
                if here(node):
                    rest += node.all_input_nodes
        return found

    def state_of(self, nodes: Sequence[fx.Node] | set[fx.Node]) -> set[str]:
        """The names of the parameters and buffers among some nodes."""
        return {name for node in nodes for name in self.state.get(node, ())}


def num_bytes(node: fx.Node) -> float:
    """Bytes of a node's tensor for the example; infinite for what is no tensor, or has a size that depends on data."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return float("inf")
    count: Any = value.numel()
    if isinstance(count, torch.SymInt):
        known = count.node.hint
    else:
        known = count
    if known is None:
        return float("inf")
    return known * value.itemsize


def modules_of(node: fx.Node) -> list[str]:
    """The paths of the modules in whose forwards an operation is, the outermost first."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def memory_of(node: fx.Node) -> set[int]:
    """The ids of the storages that a node's tensors have in the export."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose tensors an operation writes."""
    target = node.target
    if target is normalised:  # a batch norm in training
        return node.all_input_nodes[:1]
    if isinstance(target, HigherOrderOperator):
        return [one for body in _bodies(node) for one in _written_inside(node, body)]
    if not isinstance(target, OpOverload) or target is torch.ops.aten.detach_.default:
        return []
    arguments = [argument.name for argument in target._schema.arguments]
    values = dict(zip(arguments, node.args, strict=False)) | node.kwargs
    names = [name for _, name in writes_of(target)]
    if values.get("running_mean") is not None and (values.get("training") or values.get("use_input_stats")):
        names += ["running_mean", "running_var"]  # which the schema does not say
    found = pytree.tree_leaves([values.get(name) for name in names])
    return [one for one in found if isinstance(one, fx.Node)]


def _bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs inside a node, such as a part under `no_grad`."""
    module = node.graph.owning_module
    found = [attrgetter(str(one.target))(module) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def _written_inside(node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """The arguments of a node into whose tensors its body writes."""
    places = body.graph.find_nodes(op="placeholder")
    written = {storage for inner in body.graph.nodes for one in written_by(inner) for storage in memory_of(one)}
    # What is handed to a body comes last among the arguments.
    if places:
        given = pytree.tree_leaves(node.args)[-len(places) :]
    else:
        given = []
    return [one for place, one in zip(places, given, strict=True) if memory_of(place) & written]


def _is_quick(node: fx.Node) -> bool:
    """Returns whether an operation takes little time, and gives the same result every time."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return all(_is_quick(one) for body in _bodies(node) for one in body.graph.nodes if one.op == "call_function")
    if isinstance(target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and not any(part in str(target) for part in _SLOW)
    return target is not normalised
