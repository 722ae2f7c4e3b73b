"""Quantities with units, in and out: "16 GiB", "12 GB/s", "312 TFLOP/s", "5 us" are numbers in bytes, seconds, FLOP."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Sequence

from pipefit.errors import PipefitError

_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def parse_quantity(value: float | str, kind: str, where: str = "") -> float:
    """Reads a quantity of `kind` ("bytes", "bytes/s", "s" or "flops").

    A bare number is taken in the base unit: bytes, bytes per second, seconds, FLOP per second.

    >>> parse_quantity("16 GiB", "bytes") == 16 * 2**30
    True
    >>> parse_quantity("12 GB/s", "bytes/s"), parse_quantity("5 us", "s")
    (12000000000.0, 5e-06)
    >>> parse_quantity("8 Gbit/s", "bytes/s")
    1000000000.0

    Raises:
        PipefitError: the text is no such quantity; `where` names its place in a file.
    """
    if where:
        place = f"{where}: "
    else:
        place = ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise PipefitError(f"{place}expected a quantity in {kind}, got a number of too many digits") from None
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
    else:
        match = None
    if match:
        factor = _unit_factor(match.group(2), kind)
    else:
        factor = None
    if match is None or factor is None:
        examples = {"bytes": "16 GiB", "bytes/s": "12 GB/s", "s": "5 us", "flops": "312 TFLOP/s"}
        raise PipefitError(f"{place}expected a quantity in {kind} such as {examples[kind]!r}, got {value!r:.80}")
    # Dividing by a power of ten is exact where multiplying by its inverse is not.
    if factor < 1:
        return float(match.group(1)) / round(1 / factor)
    return float(match.group(1)) * factor


def in_bytes(value: float | str | None, name: str) -> float | None:
    """Bytes of a number, or of text like "1.5 GiB"; None stays None."""
    if value is None:
        return None
    return parse_quantity(value, "bytes", name)


def _unit_factor(unit: str, kind: str) -> float | None:
    if not unit:
        return 1.0
    if kind == "s":
        return _SECONDS.get(unit)
    if kind == "bytes/s":
        if not unit.endswith(("/s", "ps")):
            return None
        unit = unit[:-2]
    if kind == "flops":
        return _SCALE.get(re.sub(r"FLOPS?(/s)?$", "", unit))
    for suffix, size in (("bit", 1 / 8), ("b", 1 / 8), ("B", 1.0), ("bytes", 1.0)):
        if unit.endswith(suffix):
            prefix = unit[: -len(suffix)]
            factor = _SCALE.get(prefix, _BINARY.get(prefix))
            if factor is None:
                return None
            return factor * size
    return None


def format_bytes(num_bytes: float, up: bool = False) -> str:
    """Bytes for people, in powers of 1024.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3 GiB')
    >>> format_bytes(302081), format_bytes(302081, up=True)
    ('295 KiB', '295.1 KiB')

    Args:
        num_bytes: how many, 0 or more if rounded up.
        up: round up, for figures that a user will request.
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024 or unit == "PiB":
            break
        size /= 1024
    shown = f"{size:.4g}"
    if up and float(shown) < size:
        # Add one in the last of the four digits.
        shown = f"{float(shown) + 10.0 ** (math.floor(math.log10(size)) - 3):.4g}"
    return f"{shown} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.00123), format_seconds(75.0), format_seconds(3 * 86400)
    ('1.23 ms', '75 s', '3 days')
    """
    if seconds == 0:
        return "0 s"
    for limit, one, unit in _LIMITS:
        if abs(seconds) < limit:
            return f"{seconds / one:.4g} {unit}"
    return f"{seconds / 86400:.4g} days"


_LIMITS = (
    *((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "us"), (1.0, 1e-3, "ms")),
    *((600.0, 1.0, "s"), (36000.0, 60.0, "min"), (172800.0, 3600.0, "h")),
)


def format_count(count: float) -> str:
    """Counts for people, in powers of 1000.

    >>> format_count(1_300_000), format_count(175e9)
    ('1.3 M', '175 B')
    """
    size = float(count)
    for unit in ("", " k", " M", " B"):
        if abs(size) < 1000:
            return f"{size:.4g}{unit}"
        size /= 1000
    return f"{size:.4g} T"


def columns(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Rows of text as lines aligned to the left; with `right` all but the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if right:
        put = str.rjust
    else:
        put = str.ljust
    lines = []
    for first, *rest in rows:
        cells = (put(cell, width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    r"""Rows of text as lines of at most so many characters: all but the first column are aligned to the right.

    The widest column wraps between words. Where that is not enough, every row becomes a paragraph with the names of
    the first row. Only a word that is longer than a line exceeds the width.

    >>> print(*table([["plan", "bytes"], ["a long name", "12"]], 14), sep="\n")
    plan    bytes
    a long     12
      name

    Args:
        rows: all rows, of equal length, the first with the names of the columns.
        width: the width of the terminal, in characters.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    wide = widths.index(max(widths))
    room = width - sum(widths) - 2 * (len(widths) - 1) + widths[wide]
    if room >= widths[wide]:
        return columns(rows, right=True)
    if room < min(max(len(word) + 2 for row in rows for word in row[wide].split()), widths[wide]):
        head, *body = rows
        return [line for row in body for line in _paragraph(head, row, width)]
    lines = []
    for row in rows:
        parts = wrapped(row[wide], room, "" if wide else "  ") or [""]
        for turn, part in enumerate(parts):
            line = [""] * len(row) if turn else list(row)
            line[wide] = part
            lines.append(line)
    return columns(lines, right=True)


def _paragraph(head: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row of a table below its first cell, each other cell after the name of its column."""
    # A figure stays on the line of its unit.
    named = [f"{name} {cell}".replace(" ", "\xa0") for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    if " " in row[0]:
        first = row[0]
    else:
        first = f"{head[0]} {row[0]}"
    figures = wrapped("  " + ", ".join(named), width, "  ")
    return [*wrapped(first, width, "  "), *(line.replace("\xa0", " ") for line in figures)]


def terminal_width() -> int:
    """The columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """A text as lines of at most so many characters, broken between words only."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def counted(count: int, one: str, many: str = "") -> str:
    """A number of things in words.

    >>> counted(1, "stage"), counted(2, "stage"), counted(3, "copy", "copies")
    ('1 stage', '2 stages', '3 copies')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"
