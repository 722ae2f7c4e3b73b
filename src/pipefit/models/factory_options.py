"""Options of a model factory as text: `layers=8,hidden=256` read by the types in the factory's signature."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.errors import ModelError, nearest

_WORDS: dict[type, dict[str, object]] = {
    bool: dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False),
    types.NoneType: dict.fromkeys(("none", "auto")),
}
_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    types.NoneType: "none",
}


def valid_options(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named options of a factory, by its signature with annotations resolved."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except (NameError, TypeError, ValueError):
        signature = inspect.signature(factory)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in signature.parameters.items() if parameter.kind in named}


def _takes_any(factory: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(factory).parameters.values())


def parse_text(text: str, model: str) -> dict[str, str]:
    """Splits `a=1,b=2` into names and words.

    Raises:
        ModelError: a part is not NAME=VALUE, or a name comes twice.
    """
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ModelError(f"{model}: expected options like layers=8,hidden=256; got {part!r}")
        if name in options:
            raise ModelError(f"{model}: option {name} is given twice, as {options[name]} and {value}")
        options[name] = value
    return options


def check_options(
    factory: Callable[..., Any], options: Mapping[str, object], model: str, more: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Options with words read by the type each one has in the signature.

    Args:
        factory: whose keyword options are meant.
        options: values, or words to be read.
        model: the name for messages.
        more: further options that the factory does not take, with their defaults.

    Raises:
        ModelError: an unknown option (the valid ones are listed), or a word that is not of its type.
    """
    known = valid_options(factory)
    defaults = {name: parameter.default for name, parameter in known.items()} | dict(more or {})
    unknown = [name for name in options if name not in defaults]
    if unknown and not _takes_any(factory):
        raise ModelError(f"{model}: {_unknown(unknown[0], defaults)}")
    return {name: _read(value, _kinds(known.get(name), defaults.get(name)), model, name)
            for name, value in options.items()}  # fmt: skip


def _unknown(name: str, defaults: Mapping[str, object]) -> str:
    if not defaults:
        return f"no option {name!r}: this model takes no options"
    listed = ", ".join(
        option if default is inspect.Parameter.empty else f"{option}={default}" for option, default in defaults.items()
    )
    hint = nearest(name, defaults)
    guess = f"{hint} " if hint.startswith("did you") else ""
    return f"no option {name!r}; {guess}valid with their defaults: {listed}"


def _kinds(parameter: inspect.Parameter | None, default: object) -> tuple[type, ...]:
    """The plain types that a word may be read as; empty where the signature does not say."""
    annotation = parameter.annotation if parameter is not None else inspect.Parameter.empty
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = tuple(kind for kind in typing.get_args(annotation) if kind in _WANTED)
    else:
        kinds = (annotation,) if annotation in _WANTED else ()
    if not kinds and type(default) in _WANTED and default is not None:
        kinds = (type(default),)
    return kinds


def _read(value: object, kinds: tuple[type, ...], model: str, name: str) -> object:
    if not isinstance(value, str):
        return value
    if not kinds:
        return _literal(value)
    # The narrowest reading first, so that "1" is a number where a number or a truth value may stand.
    for kind in sorted(kinds, key=list(_WANTED).index):
        try:
            return _as_kind(value, kind)
        except ValueError:
            continue
    wanted = " or ".join(_WANTED[kind] for kind in kinds)
    raise ModelError(f"{model}: option {name} must be {wanted}, got {value!r}")


def _as_kind(word: str, kind: type) -> object:
    words = _WORDS.get(kind)
    if words is None:
        return kind(word)
    if word.lower() not in words:
        raise ValueError(word)
    return words[word.lower()]


def _literal(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)
