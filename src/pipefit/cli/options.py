"""Options of verbs: those of `pipefit.spec.options`, those that verbs share, and types that check their values.

Plain arguments of a verb are read by cyclopts: type, default, and help from the docstring's "Args".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import UNSET, CoercionError, Parameter, Token, convert

from pipefit.errors import PipefitError
from pipefit.spec.options import MOST_SEED, MOST_THREADS, as_flat, from_flat, groups_of, key_of, setting
from pipefit.units import parse_quantity

PICTURES = (".svg", ".html", ".png", ".trace.json", ".pipe", ".txt")
"""The suffixes that `-o` of a picture takes; a test compares them with `pipefit.draw.SUFFIXES`."""

Number = int | float
"""A whole number stays whole, so that whole costs give whole times."""


def exact(kind: Any, tokens: Sequence[Token]) -> Any:
    """Reads a value exactly: the parser would silently convert 2.5 to the whole number 2.

    Raises:
        CoercionError: it is of another kind; the message names the option.
    """
    if any(token.value == "" and token.implicit_value is UNSET for token in tokens):
        raise _wrong(tokens, "expected a value, got an empty one")
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    if not kinds <= {int, float}:
        return convert(kind, tokens)
    for read in (int, float) if float in kinds else (int,):
        with suppress(ValueError):
            return read(tokens[0].value)
    raise _wrong(tokens, f"expected a {'' if float in kinds else 'whole '}number, got {tokens[0].value!r}")


def shown(value: Any) -> str | None:
    """A default as the help shows it; None: it is not shown."""
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool) and value != ""
    if is_plain:
        return str(value)
    return None


def _wrong(tokens: Sequence[Token], message: str) -> CoercionError:
    return CoercionError(msg=f"{tokens[0].keyword or 'argument'}: {message}")


def _number(kind: Any, fits: Callable[[Any], bool], expected: str) -> Callable[[Any, Sequence[Token]], Any]:
    """The reader of an option that is a number of some range."""

    def read(_: Any, tokens: Sequence[Token]) -> Any:
        value = exact(kind, tokens)
        if not fits(value):
            raise _wrong(tokens, f"expected {expected}, got {value}")
        return value

    return read


def _within(least: int, most: int) -> Callable[[Any, Sequence[Token]], Any]:
    return _number(int, lambda value: least <= value <= most, f"a whole number from {least} to {most}")


_count = _number(int, lambda value: value >= 1, "at least 1")
_time = _number(Number, lambda value: 0 <= value < 1e30, "a time of 0 or more, below 1e30")
_figure = _number(Number, lambda value: 0 < value < 1e30, "numbers above 0, below 1e30")


def _size(kind: Any, tokens: Sequence[Token]) -> float:
    try:
        return parse_quantity(tokens[0].value, "bytes")
    except PipefitError as problem:
        raise _wrong(tokens, str(problem)) from None


def _each(read: Callable[[Any, Sequence[Token]], Number]) -> Parameter:
    """An option that is a list such as "2,1", whose numbers `read` converts one by one."""

    def listed(kind: Any, tokens: Sequence[Token]) -> tuple[Number, ...]:
        parts = [part for part in tokens[0].value.split(",") if part]
        try:
            return tuple(read(kind, [tokens[0].evolve(value=part)]) for part in parts)
        except CoercionError as problem:
            raise CoercionError(msg=f"{problem.msg}; several go with commas between them, like 2,1") from None

    return Parameter(converter=listed, n_tokens=1, metavar="N,N")


def ending(*known: str) -> Parameter:
    """An option that is a file to write; another suffix or a directory is refused before any work is done."""

    def read(kind: Any, tokens: Sequence[Token]) -> Path:
        path = Path(tokens[0].value)
        if path.is_dir():
            raise _wrong(tokens, f"{path}: expected a file to write, got a directory")
        if not path.name.endswith(known):
            raise _wrong(tokens, f"{path}: the suffix determines what is written: one of {', '.join(known)}")
        return path

    return Parameter(converter=read)


def pairs(name: str, texts: Sequence[str] | None) -> dict[str, int]:
    """Integers of 0 or more by name, from texts such as "warmup=2".

    Raises:
        PipefitError: a text is not NAME=INTEGER, or a name comes twice.
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


def _paired(kind: Any, tokens: Sequence[Token]) -> dict[str, int]:
    return pairs(tokens[0].keyword or "argument", [token.value for token in tokens])


Count = Annotated[int, Parameter(converter=_count)]
Seed = Annotated[int, Parameter(converter=_within(0, MOST_SEED))]
Threads = Annotated[int, Parameter(converter=_within(1, MOST_THREADS))]
Counts = Annotated[tuple[int, ...], _each(_count)]
Figures = Annotated[tuple[float, ...], _each(_figure)]
Time = Annotated[Number, Parameter(converter=_time)]
Size = Annotated[float, Parameter(converter=_size, metavar="BYTES")]
Json = Annotated[bool, Parameter(help="One JSON object on stdout, and nothing else there.")]
ProfileName = Annotated[str | None, Parameter(help="Profile of the model: seconds, bytes; or gpt:layers=24,….")]
Picture = Annotated[Path | None, Parameter(alias="-o"), ending(*PICTURES)]
TopologyName = Annotated[str | None, Parameter(help="Links and devices: a TOML file, local:N, or a name.")]

_TYPED: Mapping[str, Any] = {
    "words": Annotated[list[str], Parameter(converter=lambda _, tokens: ",".join(t.value for t in tokens))],
    "numbers": Counts,
    "figures": Figures,
    "pairs": Annotated[list[str], Parameter(converter=_paired)],
    "texts": Annotated[list[str], Parameter(consume_multiple=True)],
}
"""Types of options that differ from those in Python."""


@dataclass(frozen=True)
class UnitCosts:
    """Costs of a program whose model is not known.

    Attributes:
        forward: time of a forward, per rank and micro-batch: a chunk costs 1/v.
        backward: time of a full backward; default: input + weight, or 2.
        input: time of a backward's input-gradient half.
        weight: time of a backward's weight-gradient half.
        latency: time of a message between ranks.
        copy: time of moving all stages of a rank to or from their tier.
    """

    forward: Number = setting(1, typed=Time)
    backward: Number | None = setting(None, typed=Time)
    input: Number | None = setting(None, typed=Time)
    weight: Number | None = setting(None, typed=Time)
    latency: Number = setting(0, typed=Time)
    copy: Number = setting(2, typed=Time)


def verb(*without: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes options from the fields of each argument of a verb that is a dataclass, and of the dataclasses in it.

    Fields have their help under "Attributes" of the dataclass (see `pipefit.spec.options.setting`), unless the verb's
    docstring has another.

    Args:
        without: names of fields, or of groups of them, that the verb does not offer.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        helps = _helps(command, "Args:")
        groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and name != "return"}
        arguments: list[Argument] = []
        for argument in inspect.signature(command).parameters.values():
            if argument.name in groups:
                arguments += _options(hints[argument.name](), without, helps)
            else:
                arguments.append(argument.replace(annotation=hints[argument.name]))

        def called(*places: Any, **given: Any) -> Any:
            plain = {name: value for name, value in given.items() if name in hints.keys() - groups.keys()}
            made = {}
            for name in groups:
                known = as_flat(hints[name]())
                made[name] = from_flat(hints[name], {key: value for key, value in given.items() if key in known})
            return command(*places, **plain, **made)

        shown: Any = called
        shown.__doc__ = command.__doc__
        shown.__signature__ = inspect.Signature(arguments)
        return called

    return decorate


def _options(group: Any, without: Collection[str], helps: Mapping[str, str]) -> Iterator[Argument]:
    """The options of a group and of those in it."""
    own = _helps(type(group), "Attributes:")
    hints = get_type_hints(type(group))
    groups = groups_of(type(group))
    for one in fields(group):
        value = getattr(group, one.name)
        facts = one.metadata
        if one.name in without or facts.get("hidden"):
            continue
        if one.name in groups:
            yield from _options(groups[one.name]() if value is None else value, without, helps)
            continue
        kind: Any = facts.get("typed") or hints[one.name]
        if facts.get("least") == 1:
            kind = Count
        if isinstance(kind, str):
            kind = _TYPED[kind]
        parameter = Parameter(name=facts.get("flags") or None, help=helps.get(key_of(one), own[one.name]))
        yield Argument(key_of(one), Argument.KEYWORD_ONLY, default=value, annotation=Annotated[kind, parameter])


def _helps(described: Any, heading: str) -> dict[str, str]:
    """The entries under a heading of a docstring, by name, capitalised, without the parts about Python."""
    found = inspect.cleandoc(described.__doc__ or "").partition(heading)[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", found, re.MULTILINE)
    texts = {name: " ".join(words.split()).partition(" In Python ")[0] for name, words in entries}
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}
