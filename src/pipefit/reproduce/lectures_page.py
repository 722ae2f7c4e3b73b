"""One self-contained HTML page of all entries: pictures, values next to the published ones, and why some differ."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from pipefit.draw.chart import MISSING
from pipefit.reproduce.entry import KINDS, SORTS
from pipefit.reproduce.lectures import DECKS
from pipefit.reproduce.outcome import Outcome, picture_svg, row_of, tally


def lectures_page(outcomes: Sequence[Outcome]) -> str:
    """The page as text.

    Args:
        outcomes: of the entries to show.
    """
    import jinja2

    template = files("pipefit.reproduce").joinpath("lectures.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    by_name = {outcome.entry.name: outcome for outcome in outcomes}
    decks = {
        deck: [by_name[entry.name] for entry in entries if entry.name in by_name] for deck, entries in DECKS.items()
    }
    every = [(outcome, each) for outcome in outcomes if not outcome.entry.like for each in outcome.values]
    return environment.from_string(template).render(
        decks={deck: found for deck, found in decks.items() if found},
        kinds=KINDS,
        sorts=SORTS,
        tally=tally(outcomes),
        differing=[(outcome, each) for outcome, each in every if each.agrees is False],
        left_out=[e for entries in DECKS.values() for e in entries if e.name not in by_name],
        row=row_of,
        svg=picture_svg,
        missing=MISSING,
    )
