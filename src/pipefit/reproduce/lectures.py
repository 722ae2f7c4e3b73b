"""The lectures by their subjects, with their entries."""

from __future__ import annotations

from collections.abc import Mapping

from pipefit.errors import PipefitError, nearest
from pipefit.reproduce import challenges, easy_scaling, limited_hardware, pipedream_gpipe, three_dimensions
from pipefit.reproduce.entry import Entry

_MODULES = (pipedream_gpipe, limited_hardware, challenges, easy_scaling, three_dimensions)

DECKS: Mapping[str, tuple[Entry, ...]] = {module.DECK: module.ENTRIES for module in _MODULES}
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
    if name not in ENTRIES:
        raise PipefitError(f"no figure, table or number is called {name!r}; {nearest(name, ENTRIES)}")
    return ENTRIES[name]
