"""The result of a verb: data for programs, text for people, an exit code. Standard output gets nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipefit.spec.files import JsonObject

FINE = 0
FINDING = 1
USAGE = 2
INTERNAL_ERROR = 70
"""Exit codes: success; a finding (or a run that failed); bad input; an error inside pipefit."""


Text = str | Callable[[], str]
"""A text, or a function that makes it, where that takes time."""


def picked(thing: object, *names: str) -> JsonObject:
    """Some attributes of an object, as data for `--json`."""
    return {name: getattr(thing, name) for name in names}


def is_first() -> bool:
    """Returns whether this process prints: under a launcher of several processes every rank runs the command."""
    return int(os.environ.get("RANK", 0)) == 0


def code_of(is_good: bool) -> int:
    """The exit code of a verb that judges."""
    if is_good:
        return FINE
    return FINDING


@dataclass(frozen=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: the JSON object of `--json`.
        text: printed without `--json`; a function where the text takes time to make.
        code: exit code.
        output: the file that was written, or a list of them; None or empty: none.
    """

    data: JsonObject
    text: Text
    code: int = FINE
    output: Path | Sequence[Path] | None = None

    def show(self, wants_json: bool) -> str:
        """The text for standard output."""
        written = self.output or ()
        if wants_json:
            data = dict(self.data)
            if written:
                data["output"] = written
            return as_json(data)
        text = self.text
        if callable(text):
            text = text()
        if isinstance(written, Path):
            written = (written,)
        lines = [f"wrote {path}" for path in written]
        if text:
            lines.insert(0, text)
        return "\n".join(lines)


_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")


def printable(text: str, colours: bool = False) -> str:
    """A text whose characters that do not print are escaped: they could write anywhere in a terminal.

    Args:
        text: of any origin, such as a name in a file.
        colours: whether sequences that only change the colour stay.
    """
    if colours:
        # Of the parts every second one is a colour.
        parts = _COLOUR.split(text)
        parts[::2] = map(printable, parts[::2])
        return "".join(parts)
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode("ascii")


def as_json(data: JsonObject) -> str:
    """One line of strict JSON: infinities and NaN, which JSON does not have, become null."""
    return msgspec.json.format(msgspec.json.encode(data, enc_hook=_plain), indent=0).decode()


def _plain(value: Any) -> Any:
    """A value for JSON in place of one of another type."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__float__"):
        return float(value)
    return str(value)
