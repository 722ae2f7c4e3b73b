"""The lectures by their subjects, with their entries: records in `entries/`, and how modules make them again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fractions import Fraction
from importlib.resources import files
from typing import Any

from pipefit.errors import PipefitError, look_up
from pipefit.reproduce import (
    challenges,
    clusters,
    easy_scaling,
    evaluation,
    limited_hardware,
    measured,
    pipedream_gpipe,
    questions,
    three_dimensions,
)
from pipefit.reproduce.entry import MOST_WITHIN, Entry, Made, Value, sort_of

_MODULES = (
    pipedream_gpipe, clusters, measured, questions, limited_hardware, challenges, easy_scaling, three_dimensions,
    evaluation,
)  # fmt: skip
_MADE = {name: made for module in _MODULES for name, made in module.MADE.items()}


def _read() -> dict[str, tuple[Entry, ...]]:
    """The records of all lectures; one that is `like` another has its content and is made as that one."""
    folder = files("pipefit.reproduce").joinpath("entries")
    texts = [each.read_text(encoding="utf-8") for each in sorted(folder.iterdir(), key=lambda each: each.name)]
    decks, known = {}, {}
    for data in map(tomllib.loads, texts):
        for record in data["entries"]:
            known[record["name"]] = known.get(record.get("like"), {}) | record
        decks[data["deck"]] = tuple(_entry(known[record["name"]]) for record in data["entries"])
    return decks


def _entry(record: Mapping[str, Any]) -> Entry:
    """An entry of a record, whose `why` is that of every value without its own."""
    values = tuple(_value(record, value) for value in record.get("values", ()))
    content = {name: text for name, text in record.items() if name not in ("values", "why")}
    return Entry(**content, values=values, made=_MADE.get(record.get("like", record["name"]), Made()))


def _value(entry: Mapping[str, Any], record: Mapping[str, Any]) -> Value:
    published, within = _number(record.get("published")), record.get("within", 0.0)
    if within > MOST_WITHIN:
        raise PipefitError(
            f"{entry['name']}: {record['name']}: within: expected at most {MOST_WITHIN}, got {within}; make it a trend"
        )
    sort = sort_of(published, within, entry["kind"])
    return Value(**{"why": entry.get("why", "")} | record | {"published": published, "sort": sort})


def _number(text: Any) -> Any:
    """A value of a record: "3/7" is a number too."""
    return float(Fraction(text)) if isinstance(text, str) and "/" in text else text


DECKS: Mapping[str, tuple[Entry, ...]] = _read()
"""Every lecture by its subject, in their order."""

ENTRIES: Mapping[str, Entry] = {entry.name: entry for entries in DECKS.values() for entry in entries}
"""Every entry by its name."""


def deck_of(entry: Entry) -> str:
    """The subject of an entry's lecture; "" for an entry of none."""
    return next((deck for deck, entries in DECKS.items() if entry in entries), "")


def find_entry(name: str) -> Entry:
    """An entry by its name.

    Raises:
        PipefitError: there is none; the message suggests the nearest.
    """
    return look_up(name, ENTRIES, "no figure, table or number is called")
