"""The lectures by their subjects, with their entries: the records in `entries/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pipefit.errors import PipefitError, look_up
from pipefit.reproduce.charts import picture_of
from pipefit.reproduce.entry import MOST_WITHIN, Entry, Value, sort_of
from pipefit.reproduce.ours import make_of
from pipefit.reproduce.record_parts import Record, number_of, without

Decks = Mapping[str, tuple[Entry, ...]]


def read_lectures(texts: list[str]) -> Decks:
    """The lectures of some files; an entry that is `like` another has its content.

    Args:
        texts: the files, each with its deck, its entries and templates of calls.

    Raises:
        PipefitError: a mistake in a record; the message names entry and value.
    """
    lectures = [tomllib.loads(text) for text in texts]
    calls: dict[str, Any] = {}
    for lecture in lectures:
        calls |= lecture.get("calls", {})
    decks = {}
    known: dict[str, Record] = {}
    for lecture in lectures:
        found = []
        for record in lecture["entries"]:
            like = known.get(record.get("like"), {})
            known[record["name"]] = {**like, **record}
            found.append(_entry(known[record["name"]], calls))
        decks[lecture["deck"]] = tuple(found)
    return decks


def _entry(record: Record, calls: Record) -> Entry:
    values = {}
    for each in record.get("values", ()):
        value = _value(record, each, calls)
        if value.name in values:
            raise PipefitError(f"{record['name']}: two values are called {value.name!r}; give each a name of its own")
        values[value.name] = value
    made = tuple(values.values())
    pictures = [picture_of(each, made, calls) for each in record.get("pictures", ())]
    content = without(record, ("values", "pictures", "why"))
    return Entry(**content, values=made, pictures=tuple(pictures))


def _value(entry: Record, record: Record, calls: Record) -> Value:
    """A value of a record, with the `why` of its entry if it has none of its own."""
    where = f"{entry['name']}: {record['name']}"
    within = record.get("within", 0.0)
    if within > MOST_WITHIN:
        raise PipefitError(f"{where}: within: expected at most {MOST_WITHIN}, got {within}; make it a trend")
    if "ours" not in record:
        raise PipefitError(f"{where}: expected `ours`, the way to make it (pipefit.reproduce.ours)")
    try:
        make = make_of(record["ours"], calls)
    except PipefitError as problem:
        raise PipefitError(f"{where}: ours: {problem}") from None
    content = {"why": entry.get("why", "")} | without(record, ("ours",))
    content["published"] = number_of(record.get("published"))
    content["sort"] = sort_of(content["published"], within, entry["kind"])
    return Value(make=make, **content)


def _packaged() -> list[str]:
    folder = files("pipefit.reproduce").joinpath("entries")
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return [path.read_text(encoding="utf-8") for path in paths]


DECKS: Decks = read_lectures(_packaged())
"""Every lecture by its subject, in their order."""

ENTRIES: Mapping[str, Entry] = {entry.name: entry for entries in DECKS.values() for entry in entries}
"""Every entry by its name."""


def deck_of(entry: Entry) -> str:
    """The subject of an entry's lecture; "" for an entry of none."""
    for deck, entries in DECKS.items():
        if entry in entries:
            return deck
    return ""


def find_entry(name: str) -> Entry:
    """An entry by its name.

    Raises:
        PipefitError: there is none; the message suggests the nearest.
    """
    return look_up(name, ENTRIES, "no figure, table or number is called")
