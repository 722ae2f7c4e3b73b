"""The forward of a model as a graph of `torch.export`, with what it reads and writes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, takewhile
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ShapesCollection, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.cutting.flow import Flow, memory_of, written_by
from pipefit.errors import ModelError
from pipefit.stage.accelerator import CPU
from pipefit.stage.batchnorm import TRACKED, normalised
from pipefit.stage.instead import Instead
from pipefit.stage.opened import Rest, opened
from pipefit.stage.split import copying

_INSIDE = "of_pipefit"
"""The name of a model in a module around it."""

_LOST: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    Tensor.backward: "Tensor.backward",
    Tensor.register_hook: "Tensor.register_hook",
}
"""Functions that have no operations in a graph."""

_LEAVES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str, NoneType)
"""Values that a graph may hand out."""


_State = Mapping[fx.Node, tuple[str, ...]]
"""The names of the parameters and buffers that a placeholder stands for."""


def copied(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other parameters and buffers; one on the meta device is hollow."""
    memo = {}
    for tensor in chain(model.parameters(), model.buffers()):
        made = make(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        memo[id(tensor)] = made
    try:
        with copying():
            return copy.deepcopy(model, memo)
    except Exception as problem:
        raise ModelError(f"it cannot be copied: {problem}") from problem


def flow_of(model: nn.Module, args: Any, kwargs: Any, training: bool | None, dtype: torch.dtype | None) -> Flow:
    """The flow of a model's forward, for any number of samples if its code allows that.

    Args:
        model: hollow.
        args: positional arguments; of tensors only shapes, types and devices matter.
        kwargs: keyword arguments.
        training: the mode of all modules; None: each has its own.
        dtype: the type of floating parameters and buffers; None: their own.

    Raises:
        ModelError: it cannot be exported; with export's reason.
    """
    # In a thread of its own there is no autocast, hook or mode of who asks.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_flow_of, model, args, kwargs, training, dtype).result()


def _flow_of(model: nn.Module, args: Any, kwargs: Any, training: bool | None, dtype: torch.dtype | None) -> Flow:
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)] or [CPU]
    pretended = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(tensor: Tensor, kind: torch.dtype | None = None) -> Tensor:
        if kind is None or not tensor.is_floating_point():
            kind = tensor.dtype
        with pretended:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=devices[0])

    model = copied(model, partial(fake, kind=dtype))
    if training is not None:
        model.train(training)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.0  # else export would read the number of batches; the module itself computes, see below
    shapes = ShapesCollection()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = fake(leaf)
            shapes[leaves[place]] = dict.fromkeys(range(_num_free(leaf)), Dim.AUTO)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    _write_buffers(model)
    rests = _hand_out_tensors(model)
    root = _apart(model)
    free = shapes.dynamic_shapes(root, args, kwargs)
    drawn = random.getstate()
    try:
        with _silence(), Instead(_LOST, _refuse_lost):
            program = export(root, args, kwargs, strict=False, dynamic_shapes=free)
            module = program.module()
    except ModelError:
        raise
    except Exception as problem:
        raise ModelError(f"torch.export refuses it: {_reason(problem)}") from problem
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise ModelError("it draws from Python's random numbers, which a trace would fix: draw from torch's")
    return _flow(module, rests[0] if rests else program.call_spec.out_spec, root)


def _num_free(leaf: Tensor) -> int:
    """The number of the first dimensions of any size: the samples, and the places of what is a sequence."""
    is_sequence = leaf.dim() == 3 or (leaf.dim() == 2 and not leaf.is_floating_point())
    if is_sequence:
        return 2
    return min(leaf.dim(), 1)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The context in which torch writes nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _refuse_lost(func: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses a function whose effect a graph would lose."""
    raise ModelError(f"its forward calls {_LOST[func]}, which its graph would lose: call it in the loss")


class _Around(nn.Module):
    """A module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(_INSIDE, model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return getattr(self, _INSIDE)(*args, **kwargs)


def _apart(model: nn.Module) -> nn.Module:
    """The model, or a module around it if a name in it, such as `code`, is one of a graph's module as well."""
    names = [*model._parameters, *model._buffers, *model._modules]
    if any(hasattr(fx.GraphModule, name) for name in names):
        return _Around(model)
    return model


def _own_name(name: str) -> str:
    """A name in the model by the name in the module around it."""
    return name.removeprefix(_INSIDE).removeprefix(".")


def _write_buffers(model: nn.Module) -> None:
    """Lets a forward that replaces buffers write into them at its end, since a graph knows only their tensors."""
    forward = model.forward

    @functools.wraps(forward)
    def writing(*args: Any, **kwargs: Any) -> Any:
        kept = [(module, dict(module._buffers)) for module in model.modules()]
        output = forward(*args, **kwargs)
        written = []
        for module, buffers in kept:
            for name, buffer in buffers.items():
                value = module._buffers.get(name)
                if buffer is None or value is None or value is buffer:
                    continue
                if value.requires_grad:
                    raise ModelError(f"its forward gives the buffer {name} a value with a graph: detach it")
                written.append((buffer, value))
            module._buffers.update(buffers)
        for buffer, value in written:
            buffer.copy_(value)
        return output

    model.__dict__["forward"] = writing


def _hand_out_tensors(model: nn.Module) -> list[Rest]:
    """Lets a model whose output has objects that no pytree knows hand out the tensors in it.

    Returns:
        Gets the rest of the output, when the forward has run.
    """
    forward = model.forward
    rests: list[Rest] = []

    @functools.wraps(forward)
    def handing_out(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if all(isinstance(leaf, _LEAVES) for leaf in pytree.tree_leaves(output)):
            return output
        tensors, rest = opened(output)
        rests[:] = [rest]
        return tensors

    model.__dict__["forward"] = handing_out
    return rests


def _reason(problem: Exception) -> str:
    """The cause that export gives, and the line of the model's code where that is known."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    cause = lines[0].partition(" (unhinted")[0].rstrip(".")
    for place, line in enumerate(lines):
        if line.startswith("The following call raised"):
            code = lines[place + 1 : place + 3]
            return ": ".join([cause, *code])[:400]
    return cause[:400]


def _flow(program: Any, structure: pytree.TreeSpec | Rest, model: nn.Module) -> Flow:
    graph: fx.Graph = program.graph
    tensors: dict[Any, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    first = {tensor: name for name, tensor in reversed(tensors.items())}
    known = graph.find_nodes(op="get_attr")
    placeholders = {node: (first[tensors[node.target]],) for node in known if node.target in tensors}
    state, counting = _norms_as_modules(graph, placeholders, model)
    _put_writes_in_place(graph, state)
    overwrites = _copy_overwritten(graph)
    constants = {node: attrgetter(node.target)(program) for node in known if node not in state}
    if any(isinstance(value, FakeTensor) for value in constants.values()):
        raise ModelError("its forward computes a value that its graph does not, such as a gradient")
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (_own_name(path), kind) for key, (path, kind) in stack.items()}
    inputs = graph.find_nodes(op="placeholder")
    outputs: Any = graph.output_node().args[0]
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in counting]
    parameters = [node for node in known if isinstance(tensors.get(node.target), nn.Parameter)]
    forms = [node.meta.get("val") for node in inputs]
    guards = getattr(program, "_guards_fn", None)
    accepts = partial(_accepts, forms, guards and guards.forward)
    state = {node: tuple(map(_own_name, names)) for node, names in state.items()}
    flow = Flow(nodes, inputs, state, constants, parameters, tuple(outputs), structure, accepts, overwrites)
    written = [node for node in parameters if flow.storages[node] & flow.kept]
    if written:
        name = min(flow.state_of(written))
        raise ModelError(f"its forward writes into the weight {name}: change it after the optimizer's step")
    return flow


def _norms_as_modules(graph: fx.Graph, state: _State, model: nn.Module) -> tuple[_State, set[fx.Node]]:
    """Lets the batch norms in training note their statistics in a stage.

    Returns:
        The names of parameters and buffers, with those of the norms; and the operations that count batches, which the
        norms do themselves.
    """
    state = dict(state)
    counters = set()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        name, *_ = state.get(node.args[3], ("",))
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        if node.args[5] and isinstance(module, _BatchNorm):
            counters.add((f"{path}.num_batches_tracked",))
            kept = [f"{path}.{name}" for name, _ in module.named_buffers(recurse=False) if name in TRACKED]
            state[_deferred(node, path, module)] = tuple(kept)
    counting = {node for node, names in state.items() if names in counters}
    return state, _users(counting)


def _copy_overwritten(graph: fx.Graph) -> bool:
    """Lets a forward that writes into its input write into a copy, since every stage has the input.

    Returns:
        Whether it does.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    written: set[int] = set()
    for node in nodes:
        written.update(*map(memory_of, written_by(node)))
    found = [node for node in graph.find_nodes(op="placeholder") if memory_of(node) & written]
    for node in found:
        with graph.inserting_before(nodes[0]):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(copied, delete_user_cb=partial(operator.is_not, copied))
        # Its views and those who write have the memory of the node's value; the node itself gets other memory.
        copied.meta = dict(node.meta)
        node.meta["val"] = node.meta["val"].clone()
    return bool(found)


def _users(nodes: set[fx.Node]) -> set[fx.Node]:
    """The operations that take some nodes, or what these operations give: a norm may count several times."""
    found = set()
    rest = list(nodes)
    while rest:
        for user in rest.pop().users:
            if user.op == "call_function" and user not in found:
                found.add(user)
                rest.append(user)
    return found


def _accepts(forms: Sequence[Any], guards: Callable[..., None] | None, leaves: Sequence[Any]) -> bool:
    for form, leaf in zip(forms, leaves, strict=True):
        if isinstance(form, Tensor):
            shape: Any = form.shape
            for known, size in zip(shape, leaf.shape, strict=True):
                # A size of 1 is a program of its own, for instance in broadcasting.
                if size <= 1 and not isinstance(known, int):
                    return False
    try:
        if guards is not None:
            guards(*leaves)
    except AssertionError:
        return False
    return True


def _deferred(node: fx.Node, path: str, module: _BatchNorm) -> fx.Node:
    """Lets a batch norm note its statistics in a stage, which changes the running averages in its own way."""
    x, weight, bias, mean, var, _, share, eps, *_ = node.args
    own = None
    if share != module.momentum:
        own = share
    with node.graph.inserting_before(node):
        holder = node.graph.get_attr(path)
        call = node.graph.call_function(normalised, (holder, x, weight, bias, own, eps))
    averages: Any = (mean, var)
    holder.meta["val"] = [one.meta["val"] for one in averages]
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return holder


def _put_writes_in_place(graph: fx.Graph, state: _State) -> None:
    """Puts the new value of a buffer, which export notes at the end, where it is made and the old one was read last."""
    *nodes, _ = graph.nodes
    order = {node: place for place, node in enumerate(nodes)}
    copies = list(takewhile(_is_copy, reversed(nodes)))
    once = {node.args: node for node in copies}
    for node in copies:
        if once[node.args] is not node:
            graph.erase_node(node)
    for (buffer, value), node in once.items():
        if buffer not in state:
            continue
        memory = memory_of(buffer)
        if memory == memory_of(value):
            graph.erase_node(node)
            continue
        last = value
        for given in state:
            if memory_of(given) == memory:
                users = [user for user in given.users if user is not node]
                last = max([last, *users], key=order.__getitem__)
        last.append(node)


def _is_copy(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default
