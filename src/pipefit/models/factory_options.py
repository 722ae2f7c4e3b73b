"""Options of a model factory as text: `layers=8,hidden=256` read by the types in the factory's signature."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from pipefit.errors import ModelError, nearest
from pipefit.models.factory import Factory, Options
from pipefit.spec.files import said

_PLAIN = {int, float, bool, str, types.NoneType}
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false", "none": "null", "auto": "null"}


def signature_of(factory: Factory) -> inspect.Signature:
    """The signature of a factory, with its annotations resolved where they can be."""
    try:
        return inspect.signature(factory, eval_str=True)
    except (NameError, TypeError, ValueError):
        return inspect.signature(factory)


def parse_text(text: str, model: str) -> dict[str, str]:
    """Splits `a=1,b=[2,3]` into names and words; commas in brackets separate nothing.

    Raises:
        ModelError: a part is not NAME=VALUE, or a name comes twice.
    """
    options: dict[str, str] = {}
    for part in re.split(r",(?![^\[(]*[\])])", text):
        if not part.strip():
            continue
        name, _, value = map(str.strip, part.partition("="))
        if not name or not value:
            raise ModelError(f"{model}: expected options like layers=8,hidden=256; got {part.strip()!r}")
        if name in options:
            raise ModelError(f"{model}: option {name} is given twice, as {options[name]} and {value}")
        options[name] = value
    return options


def check_options(factory: Factory, options: Options, model: str) -> dict[str, Any]:
    """Options with words read by the type each one has in the signature.

    Args:
        factory: whose keyword options are meant.
        options: values, or words to be read.
        model: the name for messages.

    Raises:
        ModelError: an unknown option (the valid ones are listed), or a word that is not of its type.
    """
    parameters = signature_of(factory).parameters.values()
    known = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for name in options:
        if name not in known and not takes_any:
            raise ModelError(f"{model}: {_unknown(name, known)}")
    given = {}
    for name, value in options.items():
        given[name] = _read(value, known.get(name), f"{model}: option {name}")
    return given


def _unknown(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    if not known:
        return f"no option {name!r}: this model takes no options"
    listed = []
    for key, one in known.items():
        if one.default is one.empty:
            listed.append(key)
        else:
            listed.append(f"{key}={one.default}")
    guess = ""
    hint = nearest(name, known)
    if hint.startswith("did you"):
        guess = f"{hint} "
    return f"no option {name!r}; {guess}valid with their defaults: {', '.join(listed)}"


def _read(value: object, parameter: inspect.Parameter | None, where: str) -> object:
    """A word by its type; as a literal of Python where the signature names none that is plain."""
    if not isinstance(value, str):
        return value
    if parameter is None:
        return literal(_WORDS.get(value.lower(), value))
    kind = parameter.annotation
    if kind is inspect.Parameter.empty:
        kind = type(parameter.default)
    kinds = {kind}
    if isinstance(kind, types.UnionType):
        kinds = set(typing.get_args(kind))
    word = value
    if str not in kinds:
        word = _WORDS.get(value.lower(), value)
    if not kinds <= _PLAIN or kinds == {types.NoneType}:
        return literal(word)
    try:
        return msgspec.convert(word, kind, strict=False)
    except msgspec.ValidationError as problem:
        raise ModelError(f"{where}: {said(problem).partition(', got')[0]}, got {value!r}") from None


def literal(word: str) -> object:
    """A word as a literal of Python or of JSON; itself where it is none."""
    constants = {"true": True, "false": False, "none": None, "null": None}
    try:
        if word.lower() in constants:
            return constants[word.lower()]
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
