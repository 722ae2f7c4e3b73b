"""One self-contained HTML page of all entries: pictures, values next to the published ones, and why some differ."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.draw.chart import MISSING
from pipefit.reproduce.entry import KINDS, SORTS
from pipefit.reproduce.lectures import DECKS, ENTRIES
from pipefit.reproduce.outcome import Compared, Outcome, picture_svg, row_of, tally
from pipefit.spec.assets import rendered


def lectures_page(outcomes: Sequence[Outcome]) -> str:
    """The page as text.

    Args:
        outcomes: the outcomes of the entries to show.
    """
    made = {outcome.entry.name for outcome in outcomes}
    return rendered(
        "pipefit.reproduce",
        "lectures.html.j2",
        kinds=KINDS,
        sorts=SORTS,
        row=row_of,
        svg=picture_svg,
        missing=MISSING,
        tally=tally(outcomes),
        decks=_by_deck(outcomes),
        differing=_differing(outcomes),
        left_out=[entry for entry in ENTRIES.values() if entry.name not in made],
    )


def _by_deck(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each deck, without decks that have none."""
    by_name = {outcome.entry.name: outcome for outcome in outcomes}
    decks = {}
    for deck, entries in DECKS.items():
        found = [by_name[entry.name] for entry in entries if entry.name in by_name]
        if found:
            decks[deck] = found
    return decks


def _differing(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Compared]]:
    """Every value that differs, with its outcome, but not where an entry repeats another."""
    found = []
    for outcome in outcomes:
        if not outcome.entry.like:
            found += [(outcome, each) for each in outcome.values if each.agrees is False]
    return found
