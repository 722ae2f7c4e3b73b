"""Things that a forward leaves for the next one: found by several runs of a model, named, and refused."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.channels import Channels
from pipefit.cutting.differences import worst_difference
from pipefit.cutting.objects import data_of, named_parts
from pipefit.cutting.outer import is_code, outer_variables
from pipefit.cutting.own import Arguments
from pipefit.cutting.states import TREE, Buffers, States, buffers_of, kept_buffers, own_copy, put_buffers, seed_torch
from pipefit.errors import ModelError
from pipefit.stage.payload import leaves_of

_DEPTH = 6
_MOST = 100_000
_NUMBERS = bool | int | float | None
_OF_MODULES = (*TREE, "_buffers", "training")


def _facts(model: nn.Module) -> dict[str, Any]:
    """The values of a model's attributes and outer variables, and the states of Python's random numbers, by name."""
    found = {"Python's random numbers": random.getstate(), "NumPy's random numbers": repr(np.random.get_state())}
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_MODULES and not name.endswith("_hooks"):
                _gather(f"{path}.{name}".removeprefix("."), value, seen, found)
    for variable in outer_variables(model):
        if variable.is_read:
            _gather(variable.name, variable.get(), seen, found)
    return found


def _gather(name: str, value: Any, seen: set[int], found: dict[str, Any], depth: int = 0) -> None:
    """Adds the plain values that a value holds, by their names."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        found[name] = value
        return
    if id(value) in seen or depth > _DEPTH or len(found) > _MOST:
        return
    seen.add(id(value))
    data = data_of(value)
    if data is not None:
        found[name] = data
    elif isinstance(value, Tensor):
        found[name] = value.detach().clone()
    elif isinstance(value, weakref.ref):
        _gather(name, value(), seen, found, depth + 1)
    elif hasattr(value, "cache_info"):
        found[f"the number of results in the cache of {name}"] = value.cache_info().currsize
    elif isinstance(value, set | frozenset):
        found[name] = frozenset(value)
    elif hasattr(value, "__next__") and type(value).__module__ in ("itertools", "builtins"):
        found[name] = _position(value)
    elif not is_code(value):
        if isinstance(value, dict | list | tuple | deque):
            found[f"the length of {name}"] = len(value)
        for inner, one in named_parts(name, value):
            _gather(inner, one, seen, found, depth + 1)


def _position(iterator: Any) -> str:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), contextlib.suppress(TypeError):
        return repr(iterator.__reduce__())
    return ""


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Describes the first fact that two records differ in, for people; None: there is none."""
    for name in before | after:
        old = before.get(name)
        new = after.get(name)
        if _equal(old, new):
            continue
        if isinstance(old, _NUMBERS) and isinstance(new, _NUMBERS):
            return f"{name} ({old} → {new})"
        return name
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        both_nan = (a != a) & (b != b)
        return bool(((a == b) | both_nan).all())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b or (a != a and b != b))


def places_of(model: nn.Module) -> dict[str, int]:
    """The address of each weight, by its name."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def refuse_replaced(model: nn.Module, places: Mapping[str, int]) -> None:
    """Refuses a model whose forward has given a weight other memory: optimizer and other stages have the old one.

    Raises:
        ModelError: a weight is not where it was; the message names it.
    """
    for name, place in places_of(model).items():
        if places.get(name, place) != place:
            raise ModelError(
                f"its forward replaces the weight {name}, as by .data = …, which the optimizer and other stages do not "
                "see: change weights after the optimizer's step, or use torch.nn.utils.parametrize"
            )


def _lasting(found: str) -> str:
    """The message for a fact that changes at every forward."""
    if found.endswith("random numbers"):
        return f"its forward draws from {found}, which stages would draw in another order: draw from torch's"
    return (
        f"{found} changes at every forward. Stages run forwards in another order, and again in replays: make it a "
        "buffer of a block (register_buffer), a value that comes with the batch, or remove it"
    )


def _other_batches(example: Any) -> Iterator[Any]:
    """Batches of an example's kind with other data, the most different one first."""
    generator = torch.Generator().manual_seed(0)

    def made(leaf: Any, scale: float, permutes: bool) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.layout is not torch.strided:
            return leaf
        turned = leaf.detach().flip(0)
        if leaf.is_floating_point() or leaf.is_complex():
            turned = turned * scale
        elif permutes:
            order = torch.randperm(leaf.numel(), generator=generator)
            turned = turned.flatten()[order.to(leaf.device)].view(leaf.shape)
        return turned.requires_grad_(leaf.requires_grad)

    for scale, permutes in ((20.0, True), (20.0, False), (1.0, False)):
        change = functools.partial(made, scale=scale, permutes=permutes)
        yield pytree.tree_map(change, example)
    yield example


def second_batch(model: nn.Module, example: Any, arguments: Arguments) -> Any:
    """Runs a model on its example and on another batch, and refuses it if it remembers more than its buffers.

    Args:
        model: stays as it is.
        example: a batch.
        arguments: makes the positional and keyword arguments of the model from a batch.

    Returns:
        The other batch.

    Raises:
        ModelError: something of a forward remains for the next one; the message names it.
    """
    states = States(model)
    channels = Channels(model)

    # A graph writes into a copy of the batch; weights that a forward writes are found elsewhere.
    channels.tracker.on_write = lambda storage: None

    def run(batch: Any) -> list[Any]:
        args, kwargs = arguments(own_copy(batch))
        seed_torch(0)
        with channels.following((args, kwargs)):
            output = model(*args, **kwargs)
        if channels.lasting is not None:
            raise ModelError(f"{channels.lasting}: a forward must not depend on the one before")
        leaves = leaves_of(output)
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    with states.apart(), kept_buffers(model) as restore:
        first = run(example)
        left = _facts(model)
        buffers = buffers_of(model.modules())
        batch, alone = _other_run(run, states, example, first, buffers)
        second = run(batch)
        found = _changed(left, _facts(model))
        if worst_difference(alone, second) is not None:
            cause = found or "something that a forward leaves"
            raise ModelError(f"its output depends on the batches before: {_lasting(cause)}")
        restore()
        again = run(example)
        found = _changed(left, _facts(model))
        if found is not None:
            raise ModelError(_lasting(found))
        if worst_difference(first, again) is not None:
            raise ModelError("its output differs when it gets the same batch again")
    return batch


def _other_run(
    run: Callable[[Any], list[Any]], states: States, example: Any, first: list[Any], buffers: Buffers
) -> tuple[Any, list[Any]]:
    """Another batch on which a model runs, with its output as if it were the first one that it sees."""
    for batch in _other_batches(example):
        with states.apart(), contextlib.suppress(Exception):
            put_buffers(buffers)
            output = run(batch)
            if _is_finite(output) or not _is_finite(first):
                return batch, output
    with states.apart():
        put_buffers(buffers)
        return example, run(example)


def _is_finite(leaves: Sequence[Any]) -> bool:
    floating = [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]
    return all(bool(one.isfinite().all()) for one in floating)
