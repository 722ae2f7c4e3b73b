"""."""

from __future__ import annotations

from pipefit.reproduce.entry import Entry

DECK = "Pipelines and three dimensions of parallelism"
ENTRIES: tuple[Entry, ...] = ()
