"""."""

from __future__ import annotations

from pipefit.reproduce.entry import Entry

DECK = "GPipe: easy scaling with micro-batches"
ENTRIES: tuple[Entry, ...] = ()
