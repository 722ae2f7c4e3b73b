"""Arguments of public calls, checked against the annotations of their signatures.

One mechanism for all of them: `checked` for functions and methods, `check_fields` for the fields of a dataclass or
struct. Numbers may have limits: `Annotated[int, Meta(ge=1)]`.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from msgspec import Meta

from pipefit.errors import PipefitError

F = TypeVar("F", bound=Callable[..., Any])

_MOST = 2**63 - 1
_MOST_COUNT = 10**15
"""Largest whole number where there is another limit, but none above: arithmetic in floating point stays exact."""
_LARGEST: Mapping[float, str] = {_MOST: "2^63", _MOST_COUNT: "10^15"}
_SHOWN = 60

Number = Annotated[int, Meta(ge=1)]
"""A whole number of at least 1."""

Amount = Annotated[int, Meta(ge=0)]
"""A whole number of at least 0."""

Several = Annotated[int, Meta(ge=2)]
"""A whole number of at least 2."""

Seed = Annotated[int, Meta(ge=0, le=_MOST)]
"""A seed of random numbers."""

MOST_THREADS = 1024
"""Most CPU threads of a process."""

NotNegative = Annotated[float, Meta(ge=0)]
"""A number of at least 0."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""A number from 0 to 1."""


@dataclass(frozen=True)
class Kind:
    """The values that an annotation allows.

    Attributes:
        fits: returns whether a value is one of them.
        words: describe one of them.
        many: describe several; "": as `words`.
        most: the largest whole number, where `words` do not say it.
    """

    fits: Callable[[Any], bool]
    words: str
    many: str = ""
    most: float = _MOST

    @property
    def in_list(self) -> str:
        """Words for the values of a list."""
        return self.many or self.words


def checked(*apart: str) -> Callable[[F], F]:
    """Decorates a function, or the methods and the constructor of a class: arguments are checked when it is called.

    Args:
        apart: names of arguments that the call itself checks, with a better message.

    Raises:
        PipefitError: by the decorated function: an argument does not have the type of its annotation.
    """

    def decorate(call: F) -> F:
        if inspect.isclass(call):
            _decorate_methods(call, apart)
            return call
        signature = inspect.signature(call)
        hints: dict[str, Any] = {}

        @functools.wraps(call)
        def wrapper(*places: Any, **names: Any) -> Any:
            if not hints:
                # Now: some of the names in annotations are defined after the function.
                hints.update(get_type_hints(call, include_extras=True), **dict.fromkeys(apart, Any))
            bound = signature.bind(*places, **names)
            for name, value in bound.arguments.items():
                if name in hints:
                    _check(name, value, hints[name], signature.parameters[name].kind)
            return call(*places, **names)

        return typing.cast(F, wrapper)

    return decorate


def _decorate_methods(owner: type, apart: Sequence[str]) -> None:
    for name, value in list(vars(owner).items()):
        is_public = name == "__init__" or not name.startswith("_")
        if is_public and inspect.isfunction(value):
            setattr(owner, name, checked(*apart)(value))


def _check(name: str, value: Any, hint: Any, place: Any) -> None:
    """Checks an argument, or each of those that come by position or by name without a parameter of their own."""
    if place is inspect.Parameter.VAR_KEYWORD:
        hints = dict.fromkeys(value, hint)
        if get_origin(hint) is Unpack:
            hints = get_type_hints(get_args(hint)[0])
        for key, each in value.items():
            check_value(key, each, hints.get(key, Any))
    elif place is inspect.Parameter.VAR_POSITIONAL:
        for each in value:
            check_value(name, each, hint)
    else:
        check_value(name, value, hint)


def check_fields(of: object, error: type[PipefitError]) -> None:
    """Checks the fields of a dataclass or struct.

    Args:
        of: the object.
        error: the kind of error.

    Raises:
        PipefitError: of kind `error`: a field does not have the type of its annotation.
    """
    owner: Any = type(of)
    for name, hint in _hints_of(owner).items():
        check_value(name, getattr(of, name), hint, error)


@functools.cache
def _hints_of(owner: Any) -> dict[str, Any]:
    names = getattr(owner, "__struct_fields__", None) or getattr(owner, "__dataclass_fields__", {})
    hints = get_type_hints(owner, include_extras=True)
    return {name: hints[name] for name in names}


def check_value(name: str, value: object, hint: Any, error: type[PipefitError] = PipefitError) -> None:
    """Checks a value against an annotation.

    Raises:
        PipefitError: or `error`: it does not fit.
    """
    kind = kind_of(hint)
    if kind.fits(value):
        return
    if type(value) is int and abs(value) > kind.most and kind.most in _LARGEST:
        raise error(f"{name}: expected at most {_LARGEST[kind.most]}, got a number of {value.bit_length()} bits")
    raise error(f"{name}: expected {kind.words}, got {shown_value(value)}")


def shown_value(value: object) -> str:
    """A value in a message: its text, or its type where the text is long or fails."""
    try:
        text = repr(value)
    except Exception:  # of any kind, for the object is the user's
        text = ""
    is_short = 0 < len(text) <= _SHOWN and text.isprintable()
    if is_short:
        return text
    return f"an object of type {type(value).__name__}"


_ANY = Kind(lambda value: True, "anything")


@functools.lru_cache(maxsize=4096)
def kind_of(hint: Any) -> Kind:
    """The values that an annotation allows; what it does not know allows any."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is Annotated:
        return _limited(kind_of(parts[0]), parts[1])
    if origin in (Union, types.UnionType):
        return _any_of([kind_of(part) for part in parts])
    if origin is Literal:
        return Kind(lambda value: _is_one_of(value, parts), f"one of {', '.join(map(str, parts))}")
    if hint is None or hint is type(None):
        return Kind(lambda value: value is None, "None")
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(origin or hint, type):
        return _of_class(origin or hint, parts)
    return _ANY


def _any_of(kinds: Sequence[Kind]) -> Kind:
    *others, last = [kind.words for kind in kinds]
    most = min(kind.most for kind in kinds)
    return Kind(lambda value: any(kind.fits(value) for kind in kinds), f"{', '.join(others)} or {last}", most=most)


def _is_one_of(value: object, known: Sequence[object]) -> bool:
    return any(type(value) is type(one) and value == one for one in known)


_LIMITS = (
    ("ge", operator.ge, "of at least"),
    ("gt", operator.gt, "above"),
    ("le", operator.le, "at most"),
    ("lt", operator.lt, "below"),
)


def _limited(kind: Kind, meta: Meta) -> Kind:
    """The finite numbers of a kind within limits: `ge` or `gt`, and `le` or `lt`."""
    given = [(holds, getattr(meta, name), words) for name, holds, words in _LIMITS if getattr(meta, name) is not None]
    limits = " and ".join(f"{words} {limit:g}" for _, limit, words in given)

    most: float = _MOST_COUNT
    if meta.le is not None or meta.lt is not None:
        most = sys.float_info.max

    def fits(value: Any) -> bool:
        largest = most if isinstance(value, int) else sys.float_info.max
        return kind.fits(value) and value <= largest and all(holds(value, limit) for holds, limit, _ in given)

    return Kind(fits, f"{kind.words} {limits}", f"{kind.in_list} {limits}", most)


def _is_whole(value: object) -> bool:
    if type(value) is int:  # soon known: a placement holds thousands
        return -_MOST <= value <= _MOST
    # True and False are whole numbers for Python, not for people.
    return not isinstance(value, bool) and isinstance(value, Integral) and abs(int(value)) <= _MOST


def _is_number(value: object) -> bool:
    if type(value) is float:
        return not math.isnan(value)
    return not isinstance(value, bool) and isinstance(value, Real) and value == value  # not NaN


_PLAIN: Mapping[Any, Kind] = {
    Any: _ANY,
    object: _ANY,
    bool: Kind(lambda value: isinstance(value, bool), "True or False"),
    int: Kind(_is_whole, "a whole number", "whole numbers"),
    float: Kind(_is_number, "a number", "numbers"),
    str: Kind(lambda value: isinstance(value, str), "text", "texts"),
    Path: Kind(lambda value: isinstance(value, Path), "a path"),
}


def _of_class(owner: Any, parts: Sequence[Any]) -> Kind:
    """Objects of a class; of a collection the elements fit too."""
    if owner is get_origin(Callable[..., Any]):
        return Kind(callable, "a function")
    if issubclass(owner, Mapping):
        return _mapping(*[kind_of(part) for part in parts or (Any, Any)])
    if owner is tuple and parts and parts[-1] is not Ellipsis:
        return _tuple([kind_of(part) for part in parts])
    if owner in (Sequence, list, tuple):
        element = kind_of((*parts, Any)[0])
        return _listed(element, tuple if owner is tuple else object)
    if owner is Iterable:
        return Kind(_is_iterable, "a list, a loader or another iterable")
    if getattr(owner, "_is_protocol", False):
        members = [name for name in (*vars(owner), *owner.__annotations__) if not name.startswith("_")]
        return Kind(lambda value: _has(value, members), f"an object with {', '.join(members)}")
    name = owner.__name__
    article = "a"
    if name[0] in "AEIOU":
        article = "an"
    return Kind(lambda value: isinstance(value, owner), f"{article} {name}", f"{name} objects")


def _mapping(key: Kind, value: Kind) -> Kind:
    def fits(found: object) -> bool:
        if not isinstance(found, Mapping):
            return False
        return all(map(key.fits, found)) and all(map(value.fits, found.values()))

    of = ""
    if value is not _ANY:
        of = f" of {value.in_list} by name"
    return Kind(fits, f"a dict{of}", f"dicts{of}")


def _tuple(kinds: Sequence[Kind]) -> Kind:
    def fits(found: object) -> bool:
        if not isinstance(found, tuple) or len(found) != len(kinds):
            return False
        return all(kind.fits(each) for kind, each in zip(kinds, found, strict=True))

    return Kind(fits, f"({', '.join(kind.words for kind in kinds)})")


def _listed(element: Kind, owner: type) -> Kind:
    def fits(found: object) -> bool:
        if not isinstance(found, owner) or not _is_listed(found):
            return False
        # Long tuples hold few types; whole numbers need a look each only where one is large.
        return all(map(element.fits, typing.cast(Iterable[Any], found)))

    name = "list"
    if owner is tuple:
        name = "tuple"
    of = ""
    if element is not _ANY:
        of = f" of {element.in_list}"
    return Kind(fits, f"a {name}{of}", f"{name}s{of}")


def _is_listed(value: object) -> bool:
    if isinstance(value, list | tuple):
        return True
    if isinstance(value, str | bytes | Mapping | type):
        return False
    return all(hasattr(value, name) for name in ("__len__", "__getitem__", "__iter__"))


def _has(value: object, members: Iterable[str]) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in members)


def _is_iterable(value: object) -> bool:
    if isinstance(value, str | bytes | type):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
