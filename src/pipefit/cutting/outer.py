"""Variables of Python outside of a model's modules that its code can keep state in.

They are attributes of its classes, globals that its functions name, variables of closures, and default arguments.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_KNOWN = ("torch", "transformers", "peft", "huggingface_hub", "pipefit", "numpy", "builtins", "typing", "abc",
          "collections")  # fmt: skip
"""Packages whose objects hold no state of a model."""

_FOREIGN_CODE = frozenset((*_KNOWN, *sys.stdlib_module_names))
"""Packages whose code keeps no state of a model in such variables. Some is its own: `dataclasses` compares by identity
with a global, which must not be copied."""

_PLAIN = (bool, int, float, complex, str, type(None))
_HOLDERS = (list, dict, set, deque, Tensor, np.ndarray, np.random.Generator, np.random.RandomState, random.Random,
            torch.Generator)  # fmt: skip
"""Types that hold state; with them the objects of the user's own classes."""


class Variable(NamedTuple):
    """A variable outside of modules.

    Attributes:
        owner: an object that has it as an attribute, or a dict of globals.
        attribute: its name there.
        name: a name for messages.
        is_read: code does more with it than to append to it, as a log.
        is_of_class: it is an attribute of a class, which any code may read.
        is_default: it holds the default arguments of a function.
    """

    owner: Any
    attribute: str
    name: str
    is_read: bool = True
    is_of_class: bool = False
    is_default: bool = False

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the variable, whatever code refers to it."""
        return id(self.owner), self.attribute

    def get(self) -> Any:
        """Its value."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.attribute)
        return getattr(self.owner, self.attribute)

    def put(self, value: Any) -> None:
        """Sets it."""
        if isinstance(self.owner, dict):
            self.owner[self.attribute] = value
        else:
            setattr(self.owner, self.attribute, value)


def outer_variables(model: nn.Module, modules: bool = False) -> list[Variable]:
    """The variables that the code of a model can keep state in, each once.

    Args:
        model: the code.
        modules: also variables that are modules, which keep state in attributes of their own.
    """
    found: dict[tuple[int, str], Variable] = {}
    read = set()
    functions = []
    for module in model.modules():
        for value in vars(module).values():
            functions += _functions_in(value)
    kinds: list[Any] = list({kind: None for module in model.modules() for kind in type(module).__mro__})
    seen = set()
    while functions or kinds:
        if kinds:
            kind = kinds.pop()
            if id(kind) not in seen and not _is_in(_FOREIGN_CODE, kind.__module__):
                seen.add(id(kind))
                found |= {variable.key: variable for variable in _of_class(kind)}
                functions += [one for value in list(vars(kind).values()) for one in _functions_in(value)]
            continue
        function = functions.pop()
        if id(function) in seen or _is_in(_FOREIGN_CODE, getattr(function, "__module__", None)):
            continue
        seen.add(id(function))
        for variable, value in _of_function(function):
            functions += _functions_in(value)
            # A class of modules besides its own, in whose attributes it may leave something.
            if isinstance(value, type) and issubclass(value, nn.Module):
                kinds += value.__mro__
            if variable.is_default or holds_state(value) or (modules and isinstance(value, nn.Module)):
                found[variable.key] = variable
                if variable.is_read:
                    read.add(variable.key)
    return [one._replace(is_read=key in read or one.is_of_class) for key, one in found.items()]


def _of_class(kind: type) -> Iterator[Variable]:
    """The attributes of a class that may hold state."""
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") and holds_state(value):
            yield Variable(kind, name, f"{kind.__name__}.{name}", is_of_class=True)


def _of_function(function: types.FunctionType) -> Iterator[tuple[Variable, Any]]:
    """The variables that a function reads outside of its arguments, with their values."""
    label = function.__qualname__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        yield Variable(cell, "cell_contents", f"{name} in {label}", _reads(function.__code__, name)), value
    known = function.__globals__
    for name in _names(function.__code__) & known.keys():
        text = f"global {name} of {function.__module__}"
        yield Variable(known, name, text, _reads(function.__code__, name)), known[name]
    for name in ("__defaults__", "__kwdefaults__"):
        value = getattr(function, name)
        if value:
            yield Variable(function, name, f"a default argument of {label}", is_default=True), value


def _names(code: types.CodeType) -> set[str]:
    """The names of a function's code and of the functions inside it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)


def _reads(code: types.CodeType, name: str) -> bool:
    """Returns whether code does more with a variable than to append to it."""
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        appends = following is not None and following.argval in ("append", "extend", "add")
        if step.argval == name and step.opname in ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_CLASSDEREF") and not appends:
            return True
        if step.argval == name and step.opname.startswith("STORE"):
            return True
    return any(_reads(one, name) for one in code.co_consts if isinstance(one, types.CodeType))


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The functions of a value: itself, of a wrapper or property, or among the values of a dict or list."""
    if isinstance(value, dict):
        inside = list(value.values())
    else:
        inside = [value]
    if isinstance(value, list | tuple):
        inside = list(value[:100])
    found = []
    for one in inside:
        if isinstance(one, property):
            found += [one.fget, one.fset]
        elif isinstance(one, functools.partial):
            found.append(one.func)
        else:
            one = getattr(one, "__func__", one)
            found.append(getattr(one, "__wrapped__", one))
    return [one for one in found if isinstance(one, types.FunctionType)]


def is_code(value: Any) -> bool:
    """Returns whether a value is a function, a class or a module of Python."""
    kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


def holds_state(value: Any) -> bool:
    """Returns whether a variable of this value may hold state: a plain value that is replaced, or what can change."""
    return isinstance(value, _PLAIN) or can_change(value)


def can_change(value: Any) -> bool:
    """Returns whether code of the user may change what a value holds."""
    if isinstance(value, _HOLDERS):
        return True
    if isinstance(value, (*_PLAIN, nn.Module)) or is_code(value):
        return False
    return not _is_in(_KNOWN, type(value).__module__) and hasattr(value, "__dict__")


def _is_in(packages: Collection[str], module: str | None) -> bool:
    return module is None or module.partition(".")[0] in packages
