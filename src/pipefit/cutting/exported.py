"""The forward of a model as a graph of `torch.export`, with what it reads and writes."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ShapesCollection, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError
from pipefit.stage.batchnorm import TRACKED, normalised

_SLOW = ("mm", "matmul", "linear", "conv", "einsum", "fft", "attention", "lstm", "gru", "rnn")
"""Parts of the names of operations that are not done twice."""


def copied(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other parameters and buffers; one on the meta device is hollow."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        made = make(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:
        raise ModelError(f"it cannot be copied: {problem}") from problem


@dataclass(frozen=True, eq=False)
class Flow:
    """The operations of a forward.

    Attributes:
        nodes: in order.
        inputs: the leaves of the batch.
        state: the names of the parameters and buffers that a placeholder stands for: one tensor, or a batch norm's.
        constants: what else the operations take.
        parameters: those of `state` that are parameters.
        outputs: nodes or plain values.
        structure: of the output.
        accepts: whether the leaves of another batch have shapes that the graph is for.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    state: Mapping[fx.Node, tuple[str, ...]]
    constants: Mapping[fx.Node, Any]
    parameters: list[fx.Node]
    outputs: Sequence[Any]
    structure: pytree.TreeSpec
    accepts: Callable[[Sequence[Any]], bool]

    @cached_property
    def storages(self) -> dict[fx.Node, frozenset[int]]:
        """The memory of each node's tensors, as in the export."""
        every = chain(self.inputs, self.state, self.constants, self.nodes)
        return {node: frozenset(_storages(node)) for node in every}

    @cached_property
    def writers(self) -> dict[int, list[fx.Node]]:
        """The nodes that write into each memory, in order."""
        found: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            for storage in {storage for given in _written(node) for storage in self.storages[given]}:
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
        found: set[fx.Node] = set()
        rest = [node for node in wanted if isinstance(node, fx.Node)]
        while rest:
            node = rest.pop()
            if node not in found:
                found.add(node)
                rest += filter(here, self.writing(node))
                rest += node.all_input_nodes if here(node) else ()
        return found

    def state_of(self, nodes: Sequence[fx.Node] | set[fx.Node]) -> set[str]:
        """The names of the parameters and buffers among some nodes."""
        return {name for node in nodes for name in self.state.get(node, ())}


def num_bytes(node: fx.Node) -> float:
    """Bytes of a node's tensor for the example; infinite for what is no tensor, or has a size that depends on data."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return float("inf")
    count = value.numel()
    known = count.node.hint if isinstance(count, torch.SymInt) else count
    return float("inf") if known is None else known * value.itemsize


def modules_of(node: fx.Node) -> list[str]:
    """The paths of the modules in whose forwards an operation is, the outermost first."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _storages(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


def _written(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose tensors an operation writes."""
    target: Any = node.target
    if target is normalised:  # a batch norm in training
        return node.all_input_nodes[:1]
    if isinstance(target, HigherOrderOperator):
        return [one for body in _bodies(node) for one in _written_inside(node, body)]
    if not isinstance(target, OpOverload) or target is torch.ops.aten.detach_.default:
        return []
    values = {argument.name: value for argument, value in zip(target._schema.arguments, node.args, strict=False)}
    names = [one.name for one in target._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if values.get("running_mean") is not None and (values.get("training") or values.get("use_input_stats")):
        names += ["running_mean", "running_var"]  # which the schema does not say
    found = [(values | node.kwargs).get(name) for name in names]
    return [one for one in pytree.tree_leaves(found) if isinstance(one, fx.Node)]


def _bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs inside a node, such as that of a part under `no_grad`."""
    module: Any = node.graph.owning_module
    found = [attrgetter(str(one.target))(module) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def _written_inside(node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """The arguments of a node into whose tensors its body writes."""
    places = body.graph.find_nodes(op="placeholder")
    written = {storage for inner in body.graph.nodes for one in _written(inner) for storage in _storages(one)}
    # What is handed to a body comes last among the arguments.
    given = pytree.tree_leaves(node.args)[-len(places) :] if places else []
    return [one for place, one in zip(places, given, strict=True) if _storages(place) & written]


def _is_quick(node: fx.Node) -> bool:
    """Returns whether an operation takes little time, and gives the same result every time."""
    target: Any = node.target
    if isinstance(target, HigherOrderOperator):
        return all(_is_quick(one) for body in _bodies(node) for one in body.graph.nodes if one.op == "call_function")
    if isinstance(target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and not any(part in str(target) for part in _SLOW)
    return target is not normalised


def flow_of(model: nn.Module, args: Any, kwargs: Any, training: bool | None, dtype: torch.dtype | None) -> Flow:
    """The flow of a model's forward, for any number of samples if its code allows that.

    Args:
        model: hollow.
        args: positional arguments; of tensors only shapes, types and devices matter.
        kwargs: keyword arguments.
        training: the mode of all modules; None: each has its own.
        dtype: of floating parameters and buffers; None: their own.

    Raises:
        ModelError: it cannot be exported; with export's reason.
    """
    # In a thread of its own there is no autocast, hook or mode of who asks.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_flow_of, model, args, kwargs, training, dtype).result()


def _flow_of(model: nn.Module, args: Any, kwargs: Any, training: bool | None, dtype: torch.dtype | None) -> Flow:
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    pretended = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(tensor: Tensor, kind: torch.dtype | None = None) -> Tensor:
        kind = kind if kind and tensor.is_floating_point() else tensor.dtype
        with pretended:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)

    model = copied(model, partial(fake, kind=dtype))
    if training is not None:
        model.train(training)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.0  # else export would read the number of batches; the module itself computes, see below
    leaves = [fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    shapes = ShapesCollection()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # Samples, and the places of what is a sequence.
            is_sequence = leaf.dim() == 3 or (leaf.dim() == 2 and not leaf.is_floating_point())
            shapes[leaf] = dict.fromkeys(range(min(leaf.dim(), 1 + is_sequence)), Dim.AUTO)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    drawn, silenced = random.getstate(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            program = export(model, args, kwargs, strict=False, dynamic_shapes=shapes)
            module = program.module()
    except Exception as problem:
        raise ModelError(f"torch.export refuses it: {_reason(problem)}") from problem
    finally:
        logging.disable(silenced)
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise ModelError("it draws from Python's random numbers, which a trace would fix: draw from torch's")
    return _flow(module, program.call_spec.out_spec, model)


def _reason(problem: Exception) -> str:
    """The cause that export gives, and the line of the model's code where that is known."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    place = next((i for i, line in enumerate(lines) if line.startswith("The following call raised")), len(lines))
    return ": ".join([lines[0].partition(" (unhinted")[0].rstrip("."), *lines[place + 1 : place + 3]])[:400]


def _flow(program: Any, structure: pytree.TreeSpec, model: nn.Module) -> Flow:
    graph: fx.Graph = program.graph
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    known = graph.find_nodes(op="get_attr")
    state = {node: (first[id(tensors[node.target])],) for node in known if node.target in tensors}
    counters = set()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        path = state.get(node.args[3], ("",))[0].rpartition(".")[0]
        module = model.get_submodule(path)
        if node.args[5] and isinstance(module, _BatchNorm):
            counters.add((f"{path}.num_batches_tracked",))
            kept = (name for name, _ in module.named_buffers(recurse=False) if name in TRACKED)
            state[_deferred(node, path, module)] = tuple(f"{path}.{name}" for name in kept)
    _put_writes_in_place(graph, state)
    inputs = graph.find_nodes(op="placeholder")
    guards = getattr(program, "_guards_fn", None)
    counting = _users({node for node, names in state.items() if names in counters})
    flow = Flow(
        [node for node in graph.nodes if node.op == "call_function" and node not in counting],
        inputs,
        state,
        {node: attrgetter(node.target)(program) for node in known if node not in state},
        [node for node in known if isinstance(tensors.get(node.target), nn.Parameter)],
        tuple(graph.output_node().args[0]),
        structure,
        partial(_accepts, [node.meta.get("val") for node in inputs], guards and guards.forward),
    )
    if any(flow.writing(node) for node in inputs):
        raise ModelError("it writes into its input, which every stage has: let it change a copy (x = x.clone())")
    return flow


def _users(nodes: set[fx.Node]) -> set[fx.Node]:
    """The operations that take some nodes, or what these operations give: a norm may count several times."""
    found: set[fx.Node] = set()
    rest = list(nodes)
    while rest:
        users = [user for user in rest.pop().users if user.op == "call_function" and user not in found]
        found.update(users)
        rest += users
    return found


def _accepts(forms: Sequence[Any], guards: Callable[..., None] | None, leaves: Sequence[Any]) -> bool:
    sizes = [(known, size) for form, leaf in zip(forms, leaves, strict=True) if isinstance(form, Tensor)
             for known, size in zip(form.shape, leaf.shape, strict=True)]  # fmt: skip
    with contextlib.suppress(AssertionError):
        if guards is not None:
            guards(*leaves)
        # A size of 1 is a program of its own, for instance in broadcasting.
        return all(isinstance(known, int) or size > 1 for known, size in sizes)
    return False


def _deferred(node: fx.Node, path: str, module: _BatchNorm) -> fx.Node:
    """Lets a batch norm note its statistics in a stage, which changes the running averages in its own way."""
    x, weight, bias, mean, var, _, share, eps, *_ = node.args
    with node.graph.inserting_before(node):
        holder = node.graph.get_attr(path)
        own = None if share == module.momentum else share
        call = node.graph.call_function(normalised, (holder, x, weight, bias, own, eps))
    holder.meta["val"] = [one.meta["val"] for one in (mean, var)]
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return holder


def _put_writes_in_place(graph: fx.Graph, state: Mapping[fx.Node, tuple[str, ...]]) -> None:
    """Puts the new value of a buffer, which export notes at the end, where it is made and the old one was read last."""
    *nodes, _ = graph.nodes
    order = {node: place for place, node in enumerate(nodes)}
    for node in list(takewhile(lambda one: one.target is torch.ops.aten.copy_.default, reversed(nodes))):
        buffer, value = node.args
        if buffer in state and _storages(buffer) == _storages(value):
            graph.erase_node(node)
        elif buffer in state:
            users = [one for given in state if _storages(given) == _storages(buffer) for one in given.users]
            max([value, *users], key=lambda one: -1 if one is node else order[one]).append(node)
