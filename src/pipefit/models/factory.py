"""Finding and calling a user's model factory, so that every mistake in it becomes one clear message."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pipefit.errors import ModelError, PipefitError, nearest

Factory = Callable[..., Any]
"""Makes a model from its options."""
Options = Mapping[str, Any]
"""Options of a model by their names, as values or as words."""

# A script without a main guard may leave through sys.exit while it is imported; Ctrl-C must still pass.
_RAISED = (Exception, SystemExit)


def find_factory(path: str) -> Factory:
    """The callable of `pkg.mod:name` or `folder/file.py:name`; modules are also searched in the working directory.

    Raises:
        ModelError: the module or file is missing or fails when imported, or holds no such callable.
    """
    place, _, attribute = path.rpartition(":")
    if not place or not attribute:
        raise ModelError(f"expected package.module:factory or file.py:factory, got {path!r}")
    if place.endswith(".py"):
        module = _import_file(place, path)
    else:
        module = _import_module(place, path)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = vars(found)
            callables = [name for name in names if callable(names[name]) and not name.startswith("_")]
            raise ModelError(f"{path}: {place} holds no {attribute!r}; {nearest(part, callables)}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"{path}: {attribute!r} is not a function but {type(found).__name__}; give a model factory")
    return found


def _import_module(name: str, path: str) -> ModuleType:
    # An installed command does not search the working directory, but its user expects it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except _RAISED as error:
        missing = None
        if isinstance(error, ModuleNotFoundError):
            missing = error.name
        if missing and f"{name}.".startswith(f"{missing}."):
            raise ModelError(f"{path}: there is no module {missing!r}, neither installed nor in {here}") from error
        raise ModelError(f"{path}: importing {name} raised {_cause(error)}") from error


def _import_file(file: str, path: str) -> ModuleType:
    source = Path(file).resolve()
    if not source.is_file():
        raise ModelError(f"{path}: there is no file {source}")
    # One module per file, also when two folders hold files of one name.
    digest = hashlib.sha256(str(source).encode()).hexdigest()
    name = f"pipefit_user_{source.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except _RAISED as error:
        del sys.modules[name]
        raise ModelError(f"{path}: importing {file} raised {_cause(error)}") from error
    return module


def call_factory(factory: Factory, options: Options, model: str) -> Any:
    """Calls the factory; pipefit's errors pass, any other becomes a `ModelError` with its message and place."""
    try:
        return factory(**options)
    except PipefitError:
        raise
    except _RAISED as error:
        raise ModelError(f"{model}: the factory raised {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The exception and the innermost line of the user's code, not the line of a library that refused."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    return f"{type(error).__name__}: {error}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """The innermost line of the user's code in words; "": there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    users = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if not users:
        return ""
    last = users[-1]
    return f" ({last.filename}, line {last.lineno}, in {last.name})"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(("<", os.path.dirname(os.__file__)))  # noqa: PTH120
