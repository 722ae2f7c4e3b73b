"""."""

from __future__ import annotations

from pipefit.reproduce.entry import Entry

DECK = "PipeDream in three challenges"
ENTRIES: tuple[Entry, ...] = ()
