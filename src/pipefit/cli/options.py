"""Options of verbs: those of `pipefit.spec.options`, those that verbs share, and types that check their values.

Plain arguments of a verb are read by cyclopts: type, default, and help from the docstring's "Args".
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import UNSET, CoercionError, Parameter, Token, convert
from msgspec import Meta

from pipefit.errors import PipefitError
from pipefit.spec import arguments
from pipefit.spec.arguments import MOST_THREADS, Number, Several, check_value
from pipefit.spec.options import as_flat, flag_of, from_flat, key_of, options_of, setting
from pipefit.units import parse_quantity

PICTURES = (".svg", ".html", ".png", ".trace.json", ".pipe", ".txt")
"""The suffixes that `-o` of a picture takes; a test compares them with `pipefit.draw.SUFFIXES`."""

_TOO_MUCH = 1e30
"""Costs and times are below it."""

Tokens = Sequence[Token]
Read = Callable[[Any, Tokens], Any]
"""From the type of an option and its words to its value."""


def exact(kind: Any, tokens: Tokens) -> Any:
    """Reads a value exactly: the parser would silently convert 2.5 to the whole number 2.

    Raises:
        CoercionError: it is of another kind; the message names the option.
    """
    if any(token.value == "" and token.implicit_value is UNSET for token in tokens):
        raise _wrong(tokens, "expected a value, got an empty one")
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    if not kinds <= {int, float}:
        return convert(kind, tokens)
    text = tokens[0].value
    with suppress(ValueError):
        return int(text)
    if float not in kinds:
        raise _wrong(tokens, f"expected a whole number, got {text!r}")
    with suppress(ValueError):
        return float(text)
    raise _wrong(tokens, f"expected a number, got {text!r}")


def shown(value: Any) -> str | None:
    """A default as the help shows it; None: it is not shown."""
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool) and value != ""
    if is_plain:
        return str(value)
    return None


def _wrong(tokens: Tokens, message: str) -> CoercionError:
    return CoercionError(msg=f"{_name_of(tokens)}: {message}")


def _name_of(tokens: Tokens) -> str:
    return tokens[0].keyword or "argument"


def _reader(limited: Any) -> Read:
    """The reader of a number with limits; a whole number stays whole, so that whole costs give whole times."""
    kind = get_args(limited)[0]
    if kind is float:
        kind = int | float

    def read(_: Any, tokens: Tokens) -> Any:
        value = exact(kind, tokens)
        try:
            check_value(_name_of(tokens), value, limited)
        except PipefitError as error:
            raise CoercionError(msg=str(error)) from None
        return value

    return read


def within(limited: Any) -> Parameter:
    """An option that is a number with limits, such as `Annotated[int, Meta(ge=1)]`."""
    return Parameter(converter=_reader(limited))


def _size(kind: Any, tokens: Tokens) -> float:
    try:
        return parse_quantity(tokens[0].value, "bytes")
    except PipefitError as problem:
        raise _wrong(tokens, str(problem)) from None


def _names(kind: Any, tokens: Tokens) -> tuple[str, ...]:
    return tuple(exact(str, tokens).split(","))


def _each(limited: Any) -> Parameter:
    """An option that is a list such as "2,1" of numbers with limits."""
    read = _reader(limited)

    def listed(kind: Any, tokens: Tokens) -> tuple[float, ...]:
        parts = [part for part in tokens[0].value.split(",") if part]
        try:
            return tuple(read(kind, [tokens[0].evolve(value=part)]) for part in parts)
        except CoercionError as problem:
            raise CoercionError(msg=f"{problem.msg}; several go with commas between them, like 2,1") from None

    return Parameter(converter=listed, n_tokens=1, metavar="N,N")


def ending(*known: str, alias: str | None = None) -> Parameter:
    """An option that is a file to write; what cannot be written is refused before any work is done."""

    def read(kind: Any, tokens: Tokens) -> Path:
        path = Path(tokens[0].value)
        if path.is_dir():
            raise _wrong(tokens, f"{path}: expected a file to write, got a directory")
        if not path.name.endswith(known):
            raise _wrong(tokens, f"{path}: the suffix determines what is written: one of {', '.join(known)}")
        _check_place(path.absolute().parent, tokens)
        return path

    return Parameter(converter=read, alias=alias)


def _folder(kind: Any, tokens: Tokens) -> Path:
    path = Path(tokens[0].value)
    if path.exists() and not path.is_dir():
        raise _wrong(tokens, f"{path}: expected a folder, got a file")
    _check_place(path.absolute(), tokens)
    return path


def _check_place(folder: Path, tokens: Tokens) -> None:
    """Refuses a folder in which nothing can be written; one that is missing is made later, in one that is there."""
    there = next(known for known in (folder, *folder.parents) if known.exists())
    if not there.is_dir():
        raise _wrong(tokens, f"{there} is a file; expected a folder")
    if not os.access(there, os.W_OK):
        raise _wrong(tokens, f"nothing can be written in {there}; choose another folder, or allow it")


def _pairs(kind: Any, tokens: Tokens) -> dict[str, int]:
    """Integers of 0 or more by name, from texts such as "warmup=2"."""
    found: dict[str, int] = {}
    for token in tokens:
        key, _, value = token.value.partition("=")
        if not key or not value.isdecimal():
            raise _wrong(tokens, f"expected NAME=INTEGER with an integer of 0 or more, got {token.value!r}")
        if key in found:
            raise _wrong(tokens, f"{key} is given twice, as {found[key]} and {value}")
        found[key] = int(value)
    return found


Count = Annotated[int, within(Number)]
Seed = Annotated[int, within(arguments.Seed)]
Threads = Annotated[int, within(Annotated[int, Meta(ge=1, le=MOST_THREADS)])]
Counts = Annotated[tuple[int, ...], _each(Number)]
Figures = Annotated[tuple[float, ...], _each(Annotated[float, Meta(gt=0, lt=_TOO_MUCH)])]
Pairs = Annotated[list[str], Parameter(converter=_pairs)]
Time = Annotated[int | float, within(Annotated[float, Meta(ge=0, lt=_TOO_MUCH)])]
Size = Annotated[float, Parameter(converter=_size, metavar="BYTES")]
Json = Annotated[bool, Parameter(help="One JSON object on stdout, and nothing else there.")]
Picture = Annotated[Path | None, ending(*PICTURES, alias="-o")]
Simulated = Annotated[Path | None, ending(*PICTURES, ".pickle", alias="-o")]
TomlFile = Annotated[Path | None, ending(".toml", alias="-o")]
FOLDER = Parameter(converter=_folder, alias="-o")
Folder = Annotated[Path | None, FOLDER]
Ranks = Annotated[int, within(Several), Parameter(alias="-n")]
Machine = Annotated[str, Parameter(alias="--machine")]

TYPES: Mapping[str, Any] = {
    "words": Annotated[list[str], Parameter(converter=lambda _, tokens: ",".join(t.value for t in tokens))],
    "numbers": Counts,
    "figures": Figures,
    "pairs": Pairs,
    "texts": Annotated[list[str], Parameter(consume_multiple=True)],
    "time": Time,
    "bytes": Size,
    "names": Annotated[tuple[str, ...], Parameter(converter=_names, n_tokens=1, metavar="STR")],
}
"""Types of options on the command line that differ from those in Python: "numbers" are 2,1; "figures" 0.9,0.95; "words"
a=1,b=2, and may be repeated; "pairs" NAME=INTEGER, and may be repeated; "texts" are several after one flag."""


@dataclass(frozen=True)
class Starts:
    """The start of ranks, and what happens after one was lost: options of `launch`."""

    threads: int | None = setting(
        None, "CPU threads of each rank; default: the cores shared among them.", typed=Threads
    )
    recover: int = setting(
        0,
        "Times that the run goes on after a rank has died or hung: without it, or all are started again.",
        typed=Count,
    )
    min_ranks: Number | None = setting(
        None, "Ranks with which to continue if one cannot be started again; default: all."
    )
    grow: bool = setting(False, "Start a lost rank again while the others train on; it enters at the end of a step.")


def help_of(group: type[Any], name: str) -> Parameter:
    """The help of a single option that a group defines."""
    return Parameter(help=group.__dataclass_fields__[name].metadata["help"])


def verb(*without: str, **helps: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes options from the fields of each argument of a verb that is a dataclass, and of the dataclasses in it.

    cyclopts flattens dataclasses too, but it knows neither names and help in a field, nor types that differ in Python.

    Args:
        without: names of fields, or of groups of them, that the verb does not offer.
        helps: help by the name of an option, where the verb uses it in another way than its group.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint) and name != "return"}
        arguments: list[Argument] = []
        for argument in inspect.signature(command).parameters.values():
            hint = hints[argument.name]
            if argument.name in groups:
                arguments += _arguments(hint(), without, helps)
            else:
                arguments.append(argument.replace(annotation=hint))

        def called(*places: Any, **given: Any) -> Any:
            made = {}
            for name, kind in groups.items():
                known = as_flat(kind())
                made[name] = from_flat(kind, {key: given.pop(key) for key in known if key in given})
            return command(*places, **given, **made)

        shown: Any = called
        shown.__doc__ = command.__doc__
        shown.__signature__ = inspect.Signature(arguments)
        return called

    return decorate


def _read_within(hint: Any) -> Any:
    """The type of an option; a number with limits is read by them."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            return Annotated[get_args(part)[0], within(part)]
    return hint


def _arguments(group: Any, without: Collection[str], helps: Mapping[str, str]) -> Iterator[Argument]:
    """The options of a group and of those in it, as arguments of a function."""
    for one, hint, value in options_of(group, without):
        facts = one.metadata
        key = key_of(one)
        kind = facts["typed"] or _read_within(hint)
        if isinstance(kind, str):
            kind = TYPES[kind]
        names = dict.fromkeys((flag_of(one), *facts["flags"]))
        parameter = Parameter(name=tuple(names), help=helps.get(key, facts["help"]))
        yield Argument(key, Argument.KEYWORD_ONLY, default=value, annotation=Annotated[kind, parameter])
