"""The forward of a model as a graph of `torch.export`, with what it reads and writes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipefit.cutting.flow import Flow, memory_of, written_by
from pipefit.cutting.states import Copying
from pipefit.errors import ModelError
from pipefit.stage.batchnorm import TRACKED, normalised
from pipefit.stage.opened import Rest, opened

_INSIDE = "of_pipefit"
"""The name of a model in a module around it."""

_LOST: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    Tensor.backward: "Tensor.backward",
    Tensor.register_hook: "Tensor.register_hook",
}
"""Functions that have no operations in a graph."""

_LEAVES = (Tensor, bool, int, float, str, NoneType, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Values that a graph may hand out."""


def copied(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other parameters and buffers; one on the meta device is hollow."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        made = make(tensor)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad)
        else:
            memo[id(tensor)] = made
    try:
        with Copying():
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
        if not (kind and tensor.is_floating_point()):
            kind = tensor.dtype
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
    _write_buffers(model)
    rests = _hand_out_tensors(model)
    root = _apart(model)
    drawn, silenced = random.getstate(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()), _Refusing():
            program = export(root, args, kwargs, strict=False, dynamic_shapes=shapes.dynamic_shapes(root, args, kwargs))
            module = program.module()
    except ModelError:
        raise
    except Exception as problem:
        raise ModelError(f"torch.export refuses it: {_reason(problem)}") from problem
    finally:
        logging.disable(silenced)
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise ModelError("it draws from Python's random numbers, which a trace would fix: draw from torch's")
    return _flow(module, rests[0] if rests else program.call_spec.out_spec, root)


class _Refusing(TorchFunctionMode):
    """While it is entered, functions whose effect a graph would lose raise a `ModelError`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func in _LOST:
            raise ModelError(f"its forward calls {_LOST[func]}, which its graph would lose: call it in the loss")
        return func(*args, **kwargs or {})


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
    names = *model._parameters, *model._buffers, *model._modules
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
        written: list[tuple[Tensor, Tensor]] = []
        for module, buffers in kept:
            for name, buffer in buffers.items():
                value = module._buffers.get(name)
                if buffer is not None and value is not None and value is not buffer:
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
    forward, rests = model.forward, list[Rest]()

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
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    place = next((i for i, line in enumerate(lines) if line.startswith("The following call raised")), len(lines))
    return ": ".join([lines[0].partition(" (unhinted")[0].rstrip("."), *lines[place + 1 : place + 3]])[:400]


def _flow(program: Any, structure: pytree.TreeSpec | Rest, model: nn.Module) -> Flow:
    graph: fx.Graph = program.graph
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    known = graph.find_nodes(op="get_attr")
    state: dict[fx.Node, tuple[str, ...]] = {}
    for node in known:
        if node.target in tensors:
            state[node] = (first[id(tensors[node.target])],)
    counters = set()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        path = state.get(node.args[3], ("",))[0].rpartition(".")[0]
        module = model.get_submodule(path)
        if node.args[5] and isinstance(module, _BatchNorm):
            counters.add((f"{path}.num_batches_tracked",))
            kept = (name for name, _ in module.named_buffers(recurse=False) if name in TRACKED)
            state[_deferred(node, path, module)] = tuple(f"{path}.{name}" for name in kept)
    _put_writes_in_place(graph, state)
    overwrites = _copy_overwritten(graph)
    constants = {node: attrgetter(node.target)(program) for node in known if node not in state}
    if any(isinstance(value, FakeTensor) for value in constants.values()):
        raise ModelError("its forward computes a value that its graph does not, such as a gradient")
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (_own_name(path), kind) for key, (path, kind) in stack.items()}
    inputs = graph.find_nodes(op="placeholder")
    guards = getattr(program, "_guards_fn", None)
    counting = _users({node for node, names in state.items() if names in counters})
    outputs: Any = graph.output_node().args[0]
    flow = Flow(
        [node for node in graph.nodes if node.op == "call_function" and node not in counting],
        inputs,
        {node: tuple(map(_own_name, names)) for node, names in state.items()},
        constants,
        [node for node in known if isinstance(tensors.get(node.target), nn.Parameter)],
        tuple(outputs),
        structure,
        partial(_accepts, [node.meta.get("val") for node in inputs], guards and guards.forward),
        overwrites,
    )
    written = {storage for node in flow.parameters for storage in flow.storages[node]} & flow.kept
    if written:
        name = min(flow.state_of([node for node in flow.parameters if flow.storages[node] & written]))
        raise ModelError(f"its forward writes into the weight {name}: change it after the optimizer's step")
    return flow


def _copy_overwritten(graph: fx.Graph) -> bool:
    """Lets a forward that writes into its input write into a copy, since every stage has the input.

    Returns:
        Whether it does.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    written = {storage for node in nodes for given in written_by(node) for storage in memory_of(given)}
    found = [node for node in graph.find_nodes(op="placeholder") if memory_of(node) & written]
    for node in found:
        with graph.inserting_before(nodes[0]):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(copied, delete_user_cb=lambda user, own=copied: user is not own)
        # Its views and those who write have the memory of the node's value; the node itself gets other memory.
        copied.meta = dict(node.meta)
        node.meta["val"] = node.meta["val"].clone()
    return bool(found)


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
    sizes: list[tuple[Any, int]] = []
    for form, leaf in zip(forms, leaves, strict=True):
        if isinstance(form, Tensor):
            sizes += zip(form.shape, leaf.shape, strict=True)
    with contextlib.suppress(AssertionError):
        if guards is not None:
            guards(*leaves)
        # A size of 1 is a program of its own, for instance in broadcasting.
        return all(isinstance(known, int) or size > 1 for known, size in sizes)
    return False


def _deferred(node: fx.Node, path: str, module: _BatchNorm) -> fx.Node:
    """Lets a batch norm note its statistics in a stage, which changes the running averages in its own way."""
    given: Any = node.args
    x, weight, bias, mean, var, _, share, eps, *_ = given
    with node.graph.inserting_before(node):
        holder = node.graph.get_attr(path)
        if share == module.momentum:
            own = None
        else:
            own = share
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
    copies = list(takewhile(lambda one: one.target is torch.ops.aten.copy_.default, reversed(nodes)))
    once = {node.args: node for node in copies}
    for node in copies:
        if once[node.args] is not node:
            graph.erase_node(node)
    for (buffer, value), node in once.items():
        if buffer in state and memory_of(buffer) == memory_of(value):
            graph.erase_node(node)
        elif buffer in state:
            users = [one for given in state if memory_of(given) == memory_of(buffer) for one in given.users]
            max([value, *users], key=lambda one: -1 if one is node else order[one]).append(node)
