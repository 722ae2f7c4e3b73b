"""Options that several verbs share, with their help, and the checks that name the option in their message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import CoercionError, Parameter, Token, convert

from pipefit.errors import PipefitError, nearest

__all__ = [
    "PICTURES",
    "Backward",
    "Copy",
    "Forward",
    "InputGradient",
    "Json",
    "Latency",
    "Number",
    "ProfileName",
    "TopologyName",
    "WeightGradient",
    "check_suffix",
    "check_times",
    "count",
    "exact",
    "flag",
    "help_of",
    "numbers",
    "pairs",
    "sizes",
    "whole_numbers",
]

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


Json = Annotated[bool, flag("One JSON object on stdout, and nothing else there.", "--json")]
Forward = Annotated[Number, help_of("Time of a forward, per rank and micro-batch: a chunk costs 1/v.")]
Backward = Annotated[Number | None, help_of("Time of a full backward; default: input + weight, or 2.")]
InputGradient = Annotated[Number | None, help_of("Time of a backward's input-gradient half.", "--input")]
WeightGradient = Annotated[Number | None, help_of("Time of a backward's weight-gradient half.", "--weight")]
Latency = Annotated[Number, help_of("Time of a message between ranks.")]
ProfileName = Annotated[str | None, help_of("Profile of the model: seconds, bytes; or gpt:layers=24,….")]
TopologyName = Annotated[str | None, help_of("Links and devices: a TOML file, local:N, or a name.")]
Copy = Annotated[Number, help_of("Time of moving all stages of a rank to or from the tier they are spilled to.")]


def count(name: str, value: int) -> int:
    """A count, which is at least 1.

    Raises:
        PipefitError: it is not.
    """
    if value < 1:
        raise PipefitError(f"{name}: expected at least 1, got {value}")
    return value


def check_times(**times: Number | None) -> None:
    """Refuses times that are negative or not finite, by the names of their options.

    Raises:
        PipefitError: one is.
    """
    for name, value in times.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise PipefitError(f"--{name}: expected a time of 0 or more, got {value}")


def whole_numbers(name: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a list such as "2,1", all at least 1.

    Raises:
        PipefitError: the text is no such list.
    """
    if not text:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PipefitError(f"{name}: expected whole numbers with commas between them, like 2,1; got {text!r}") from None
    for number in numbers:
        count(name, number)
    return numbers


def numbers(name: str, text: str | None) -> tuple[float, ...]:
    """The numbers of a list such as "2,1.5", all finite and more than 0.

    Raises:
        PipefitError: the text is no such list.
    """
    if not text:
        return ()
    try:
        found = tuple(int(part) if part.strip().isdecimal() else float(part) for part in text.split(","))
    except ValueError:
        raise PipefitError(f"{name}: expected numbers with commas between them, like 2,1.5; got {text!r}") from None
    for number in found:
        if not (math.isfinite(number) and number > 0):
            raise PipefitError(f"{name}: expected numbers above 0, got {number}")
    return found


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


def sizes(name: str, texts: Sequence[str], known: Iterable[str]) -> dict[str, int]:
    """Integers by name, from texts such as "layers=8,hidden=256".

    Raises:
        PipefitError: a text is no such list, or a name is not one of the known.
    """
    found = pairs(name, [word for text in texts for word in text.split(",")])
    for key in found:
        if key not in known:
            raise PipefitError(f"{name}: unknown {key!r}; {nearest(key, known)}")
    return found


def check_suffix(path: Path | None, known: tuple[str, ...]) -> None:
    """Refuses an output file of a kind that cannot be written, before any work is done.

    Raises:
        PipefitError: the path ends otherwise than the known ones, or is a directory.
    """
    if path is None:
        return
    if path.is_dir():
        raise PipefitError(f"{path}: expected a file to write, got a directory")
    if not path.name.endswith(known):
        raise PipefitError(f"{path}: the ending says what to write: one of {', '.join(known)}")
