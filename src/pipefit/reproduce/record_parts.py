"""Parts of records, and their numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

Record = Mapping[str, Any]
"""A table of a file of entries."""


def only(record: Record, names: Collection[str]) -> dict[str, Any]:
    """The part of a record with these names.

    >>> only({"figure": "rate", "at": 0}, ("at", "given"))
    {'at': 0}
    """
    return {name: value for name, value in record.items() if name in names}


def without(record: Record, names: Collection[str]) -> dict[str, Any]:
    """The part of a record with other names.

    >>> without({"figure": "rate", "at": 0}, ("at", "given"))
    {'figure': 'rate'}
    """
    return {name: value for name, value in record.items() if name not in names}


def number_of(text: Any) -> Any:
    """A value of a record: "3/7" is a number too.

    >>> number_of("3/4"), number_of(2), number_of("15-1")
    (0.75, 2, '15-1')
    """
    if isinstance(text, str) and "/" in text:
        return float(Fraction(text))
    return text
