"""Options of verbs: those of `pipefit.spec.options`, those that several verbs share, and checks that name them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import Parameter as Argument
from inspect import isfunction
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import CoercionError, Parameter, Token, convert

from pipefit.errors import PipefitError
from pipefit.spec.options import flag_of, from_flat, groups_of, key_of

PICTURES = (".svg", ".html", ".png", ".trace.json", ".pipe", ".txt")
"""The endings that `-o` of a picture takes; a test holds them to `pipefit.draw.SUFFIXES`."""

Number = int | float
"""A whole number stays whole, so that whole costs give whole times."""


def exact(kind: Any, tokens: Sequence[Token]) -> Any:
    """Reads what was typed as it stands: the parser alone would silently take 2.5 for the whole number 2.

    Raises:
        ValueError: it is not of its kind; the parser names the option.
    """
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    if not kinds <= {int, float}:
        return convert(kind, tokens)
    word = tokens[0].value
    try:
        return int(word)
    except ValueError:
        if float not in kinds:
            raise CoercionError(msg=f"{_name(tokens)}: expected a whole number, got {word!r}") from None
    try:
        return float(word)
    except ValueError:
        raise CoercionError(msg=f"{_name(tokens)}: expected a number, got {word!r}") from None


def _name(tokens: Sequence[Token]) -> str:
    return tokens[0].keyword or "argument"


def help_of(text: str, *names: str) -> Parameter:
    """An option's help, and its names where they are not the parameter's own."""
    return Parameter(name=names or None, help=text, negative=())


def flag(text: str, *names: str) -> Parameter:
    """The same for a flag, which has no opposite."""
    return Parameter(name=names or None, help=text, negative=(), show_default=False)


def verb(*without: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a verb of a function: each argument is an option, and so is each field of an argument that is a dataclass.

    The help of an argument stands under "Args" of the function's docstring, its short name and the functions that
    check it behind its type, as in `Annotated[int, "-n", count]`. Fields of dataclasses have theirs (see
    `pipefit.spec.options.setting`), unless the function's docstring has another.

    Args:
        without: names of fields, or of groups of them, that the verb does not offer.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints, bare = get_type_hints(command, include_extras=True), get_type_hints(command)
        helps = _helps(command, "Args:")
        groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
        groups.pop("return")  # the verb's answer is a dataclass too

        def called(*places: Any, **given: Any) -> Any:
            for name, check in checks.items():
                if given.get(name) is not None:
                    check(given[name])
            plain = {name: value for name, value in given.items() if name in hints.keys() - groups.keys()}
            return command(*places, **plain, **{name: from_flat(group, given) for name, group in groups.items()})

        arguments: list[Argument] = []
        checks: dict[str, Callable[[Any], Any]] = {}
        for argument in inspect.signature(command).parameters.values():
            if argument.name not in groups:
                notes = list(_notes(hints[argument.name]))
                arguments.append(_described(argument, bare[argument.name], notes, helps.get(argument.name, "")))
                for check in filter(isfunction, notes):
                    checks[argument.name] = partial(check, _flag(argument.name, notes))
                continue
            for one, value, kind, text in _visible(groups[argument.name](), without):
                arguments.append(_argument(one, value, kind, helps.get(key_of(one), text)))
                if one.metadata.get("least") == 1:
                    checks[key_of(one)] = partial(count, flag_of(one))
        called.__doc__, called.__module__, called.__name__ = command.__doc__, command.__module__, command.__name__
        called.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
        return called

    return decorate


def _notes(hint: Any) -> Iterator[Any]:
    """All that stands behind a type, or behind a part of it."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for part in get_args(hint):
        yield from _notes(part)


def _flag(name: str, notes: Sequence[Any]) -> str:
    """The long name of an option."""
    named = [name for note in notes if isinstance(note, Parameter) for name in note.name or ()]
    return named[0] if named else f"--{name.replace('_', '-')}"


def _described(argument: Argument, kind: Any, notes: Sequence[Any], text: str) -> Argument:
    """An argument of a verb with its help and its names."""
    parameters = [note for note in notes if isinstance(note, Parameter)]
    if text:
        short = [note for note in notes if isinstance(note, str)]
        names = (_flag(argument.name, ()), *short) if short else ()
        parameters.append((flag if kind is bool else help_of)(text, *names))
    return argument.replace(annotation=Annotated[kind, *parameters] if parameters else kind)


def _visible(group: Any, without: Collection[str]) -> Iterator[tuple[Any, Any, Any, str]]:
    """The fields of a group and of those in it that the command line offers: field, default, type, help."""
    helps, hints, groups = _helps(type(group), "Attributes:"), get_type_hints(type(group)), groups_of(type(group))
    for one in fields(group):
        value = getattr(group, one.name)
        if one.name in without or one.metadata.get("hidden"):
            continue
        if one.name in groups:
            yield from _visible(groups[one.name]() if value is None else value, without)
        else:
            yield one, value, one.metadata.get("typed") or hints[one.name], helps[one.name]


def _argument(one: Any, value: Any, kind: Any, text: str) -> Argument:
    """The option of a field with its default and help."""
    typed, extra = _TYPED.get(kind, (kind, {}))
    shown = isinstance(value, int | float | str) and not isinstance(value, bool) and value != ""
    names = one.metadata.get("flags") or None
    parameter = Parameter(name=names, help=text, negative=(), show_default=shown, **extra)
    return Argument(key_of(one), Argument.KEYWORD_ONLY, default=value, annotation=Annotated[typed, parameter])


def _joined(kind: Any, tokens: Sequence[Token]) -> str:
    return ",".join(token.value for token in tokens)


def _listed(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """The numbers of a list such as "2,1", all at least 1."""
    name, text = _name(tokens), tokens[0].value
    try:
        return tuple(count(name, int(part)) for part in text.split(",") if text)
    except PipefitError as problem:
        raise CoercionError(msg=str(problem)) from None
    except ValueError:
        expected = "expected whole numbers with commas between them, like 2,1"
        raise CoercionError(msg=f"{name}: {expected}; got {text!r}") from None


def _figures(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    """The numbers of a list such as "2,1.5", all finite and more than 0."""
    name, text = _name(tokens), tokens[0].value
    try:
        found = tuple(int(part) if part.strip().isdecimal() else float(part) for part in text.split(",") if text)
    except ValueError:
        expected = "expected numbers with commas between them, like 2,1.5"
        raise CoercionError(msg=f"{name}: {expected}; got {text!r}") from None
    for number in found:
        if not (math.isfinite(number) and number > 0):
            raise CoercionError(msg=f"{name}: expected numbers above 0, got {number}")
    return found


def _paired(kind: Any, tokens: Sequence[Token]) -> dict[str, int]:
    return pairs(_name(tokens), [token.value for token in tokens])


_TYPED: dict[Any, tuple[Any, dict[str, Any]]] = {
    "words": (list[str], {"converter": _joined}),
    "numbers": (tuple[int, ...], {"converter": _listed, "n_tokens": 1, "metavar": "N,N"}),
    "pairs": (list[str], {"converter": _paired}),
    "texts": (list[str], {"consume_multiple": True}),
}
"""Types of options that are typed otherwise than Python's."""


def _helps(described: Any, heading: str) -> dict[str, str]:
    """The entries under a heading of a docstring, by name, with a capital, up to what is for Python."""
    found = inspect.cleandoc(described.__doc__ or "").partition(heading)[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", found, re.MULTILINE)
    texts = {name: " ".join(words.split()).partition(" In Python ")[0] for name, words in entries}
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}


def count(name: str, value: int) -> int:
    """A count, which is at least 1.

    Raises:
        PipefitError: it is not.
    """
    if value < 1:
        raise PipefitError(f"{name}: expected at least 1, got {value}")
    return value


def at_least_0(name: str, value: Number) -> None:
    """Refuses a time that is negative or not finite.

    Raises:
        PipefitError: it is.
    """
    if not (math.isfinite(value) and value >= 0):
        raise PipefitError(f"{name}: expected a time of 0 or more, got {value}")


def ending(*known: str) -> Callable[[str, Path], None]:
    """A check that refuses a file of a kind that cannot be written, before any work is done.

    The check raises a PipefitError where the path ends otherwise than the known ones, or is a directory.
    """

    def check(name: str, path: Path) -> None:
        if path.is_dir():
            raise PipefitError(f"{path}: expected a file to write, got a directory")
        if not path.name.endswith(known):
            raise PipefitError(f"{path}: the ending says what to write: one of {', '.join(known)}")

    return check


Count = Annotated[int, count]
Counts = Annotated[
    tuple[int, ...], Parameter(converter=_listed, n_tokens=1, metavar="N,N", negative=(), show_default=False)
]
Figures = Annotated[
    tuple[float, ...], Parameter(converter=_figures, n_tokens=1, metavar="X,X", negative=(), show_default=False)
]
Json = Annotated[bool, flag("One JSON object on stdout, and nothing else there.", "--json")]
Forward = Annotated[Number, help_of("Time of a forward, per rank and micro-batch: a chunk costs 1/v."), at_least_0]
Backward = Annotated[Number | None, help_of("Time of a full backward; default: input + weight, or 2."), at_least_0]
InputGradient = Annotated[Number | None, help_of("Time of a backward's input-gradient half.", "--input"), at_least_0]
WeightGradient = Annotated[Number | None, help_of("Time of a backward's weight-gradient half.", "--weight"), at_least_0]
Latency = Annotated[Number, help_of("Time of a message between ranks."), at_least_0]
ProfileName = Annotated[str | None, help_of("Profile of the model: seconds, bytes; or gpt:layers=24,….")]
TopologyName = Annotated[str | None, help_of("Links and devices: a TOML file, local:N, or a name.")]
Copy = Annotated[
    Number, help_of("Time of moving all stages of a rank to or from the tier they are spilled to."), at_least_0
]


def pairs(name: str, texts: Sequence[str] | None) -> dict[str, int]:
    """Integers of 0 or more by name, from texts such as "warmup=2".

    Raises:
        PipefitError: a text is no NAME=INTEGER, or a name comes twice.
    """
    found: dict[str, int] = {}
    for text in texts or []:
        key, _, value = text.partition("=")
        if not key or not value.isdecimal():
            raise PipefitError(f"{name}: expected NAME=INTEGER with an integer of 0 or more, got {text!r}")
        if key in found:
            raise PipefitError(f"{name}: {key} is given twice, as {found[key]} and {value}")
        found[key] = int(value)
    return found
