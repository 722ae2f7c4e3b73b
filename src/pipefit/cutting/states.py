"""The state of a model besides its weights: attributes, buffers, and variables that its code keeps elsewhere.

A cut is proved with a state of its own for each layer, as stages in different processes have them. The modules stay the
same objects; their dictionaries are exchanged:

    module.__dict__      the user's ─► that of layer 1 ─► that of layer 2 ─► the user's
    weights              shared by all
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.outer import outer_variables
from pipefit.errors import ModelError
from pipefit.stage.accelerator import CPU
from pipefit.stage.device import random_state_kept
from pipefit.stage.materialise import stand_in
from pipefit.stage.split import NamedLayer, copying

TREE = ("_parameters", "_modules")
_SHARED = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    types.FunctionType,
    types.ModuleType,
    logging.Logger,
    fx.Graph,
    type(threading.Lock()),
    type(threading.RLock()),
)
"""Types that are never copied."""

_PLAIN = frozenset((bool, int, float, str, type(None)))
"""The most frequent of them."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, its weights, buffers and hooks among them."""

_CONTAINERS = frozenset((dict, OrderedDict, set, list))
"""Types of which every module has many that are empty, such as its hooks."""


@dataclass
class State:
    """One state of a model.

    Attributes:
        dicts: one for each module.
        values: one for each outer variable.
    """

    dicts: list[dict[str, Any]]
    values: list[Any]


class States:
    """Separate states of one model, all copies of the one it has now.

    Args:
        model: its weights are shared by all states.

    Raises:
        ModelError: an attribute cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        # A script's dictionary is its compiled code's: its state is shared.
        self._modules = {path: m for path, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
        self._variables = outer_variables(model)
        self._fixed: dict[int, Any] = {id(module): module for module in model.modules()}
        self._fixed |= {id(parameter): parameter for parameter in model.parameters()}
        self._start = self._now()

    def fresh(self, own: Collection[nn.Module] | None = None) -> State:
        """A copy of the state from which these states were made.

        Args:
            own: modules whose buffers are copied; None: all.
        """
        memo = dict(self._fixed)
        for module, values in zip(self._modules.values(), self._start.dicts, strict=True):
            if own is not None and module not in own:
                for buffer in values["_buffers"].values():
                    memo[id(buffer)] = buffer
        dicts = []
        with copying(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            for (path, module), values in zip(self._modules.items(), self._start.dicts, strict=True):
                copied = dict(values)
                for key, value in values.items():
                    kind = type(value)
                    if kind in _CONTAINERS and not value:
                        copied[key] = memo.setdefault(id(value), kind())
                    elif kind not in _PLAIN:
                        copied[key] = _copy_of(path or type(module).__name__, key, value, memo)
                dicts.append(copied)
            outer = [_copy_or_same(value, memo) for value in self._start.values]
        return State(dicts, outer)

    def apart(self, own: Collection[nn.Module] | None = None) -> contextlib.AbstractContextManager[None]:
        """The context in which the model has a state of its own, which ends with it; see `fresh`."""
        return self.used(self.fresh(own))

    @contextlib.contextmanager
    def used(self, state: State) -> Iterator[None]:
        """The context in which the model has a state, and leaves what it changes there."""
        before = self._now()
        self._put(state)
        try:
            yield
        finally:
            state.values = self._now().values
            self._put(before)

    def _now(self) -> State:
        return State([vars(m) for m in self._modules.values()], [variable.get() for variable in self._variables])

    def _put(self, state: State) -> None:
        for module, values in zip(self._modules.values(), state.dicts, strict=True):
            object.__setattr__(module, "__dict__", values)
        for variable, value in zip(self._variables, state.values, strict=True):
            variable.put(value)


def _copy_of(place: str, key: str, value: Any, memo: dict[int, Any]) -> Any:
    if key in TREE:
        return value.copy()
    try:
        return _copy(value, memo)
    except Exception as problem:
        raise ModelError(
            f"{place}.{key} ({type(value).__name__}) cannot be copied, which the proof of a cut needs: {problem}; give "
            "its class a method __deepcopy__, or the model as a list of layers"
        ) from problem


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, tuple) and _PLAIN.issuperset(map(type, value)):
        return value
    return copy.deepcopy(value, memo)


def _copy_or_same(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return _copy(value, memo)
    except Exception:  # of any kind: the object is not the model's own
        return value


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[Callable[[], None]]:
    """The context after which a model has its buffers back, also those that its forward replaced by others.

    It gives the function that does this.
    """
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    values = {buffer: buffer.clone() for buffer in model.buffers()}

    @torch.no_grad()
    def restore() -> None:
        for module, buffers in kept:
            module._buffers.update(buffers)
        for buffer, value in values.items():
            buffer.copy_(value)

    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def kept_outside(model: nn.Module, device: torch.device = CPU) -> Iterator[None]:
    """The context after which weights, and random numbers of the host and of a device, are what they were."""
    kept = [(one, one.data, one.grad, one.requires_grad) for one in model.parameters()]
    try:
        with random_state_kept(device):
            yield
    finally:
        for parameter, data, grad, trains in kept:
            parameter.grad = None
            if _form(parameter) != _form(data):
                parameter.data = data
            parameter.grad = grad
            parameter.requires_grad_(trains)


def _form(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def with_loss(loss: Any, model: nn.Module | None = None) -> Any:
    """One module that has a model and its loss, so that the state of both is found."""
    both: Any = nn.Module()
    both.model = model
    both.loss = loss
    return both


@contextlib.contextmanager
def attributes_kept(layers: Iterable[nn.Module], loss: Any = None) -> Iterator[None]:
    """The context after which attributes of layers, and variables outside of them, are what they were.

    Layers of a cut model are left alone: it was proved that nothing of a forward remains for the next one.

    Args:
        layers: a sequence; weights and buffers are the caller's.
        loss: of its output, whose variables are kept, too.
    """
    roots = nn.ModuleList(layers)
    states = States(with_loss(loss, roots))
    apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not any(hasattr(layer, "shell") for layer in roots):
        with contextlib.suppress(ModelError):
            apart = states.apart(())
    with apart:
        yield


def fill_zeros(model: nn.Module) -> None:
    """Replaces the weights that are all 0 by random ones: a 0 hides what it multiplies, and its gradient."""
    generator = torch.Generator().manual_seed(0)

    def drawn(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator).mul_(0.1).to(weight)

    stand_in([NamedLayer(0, "", model)], drawn, _is_zero)


def _is_zero(tensor: Tensor) -> bool:
    if type(tensor) is not nn.Parameter or not tensor.is_floating_point() or tensor.is_meta:
        return False
    return not tensor.count_nonzero()


def seed_torch(number: int) -> None:
    """Seeds torch's random numbers; where there is only a CPU, without a note for devices that may come."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def own_copy(batch: Any) -> Any:
    """A batch that a forward may write into."""

    def copied(leaf: Tensor) -> Tensor:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(Tensor, copied, batch)


Buffers = Mapping[tuple[nn.Module, str], Tensor]
"""Buffers by module and name."""


def buffers_of(modules: Iterable[nn.Module]) -> Buffers:
    """Copies of the buffers of some modules."""
    found = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found[module, name] = buffer.detach().clone()
    return found


def put_buffers(buffers: Buffers) -> None:
    """Gives modules copies of buffers."""
    for (module, name), value in buffers.items():
        module._buffers[name] = value.clone()
