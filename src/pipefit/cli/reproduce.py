"""`pipefit reproduce`: the figures, tables and numbers of the lectures, made again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli.answer import Answer, picked
from pipefit.cli.heartbeat import Heartbeat
from pipefit.cli.options import Folder, Json
from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically
from pipefit.units import columns, counted

if TYPE_CHECKING:
    from pipefit.reproduce.outcome import Outcome


PUBLISHED = "published-runs"
"""The entry that is not of the lectures: training runs that others have published."""


def command(
    name: str | None = None,
    /,
    *,
    all: bool = False,
    measured: bool = False,
    output: Folder = None,
    json: Json = False,
) -> Answer:
    """Make a figure, table or number of the lectures again, and compare it with the published one.

    Example: pipefit reproduce gpipe-flushes -o figures

    Without a name all are listed. Drawn entries are exact; computed ones are predicted from profiles and machines;
    measured ones train on this machine, which takes minutes. published-runs predicts training runs of others.

    Args:
        name: Of an entry, as the list shows it.
        all: Make all entries; with -o one page of everything.
        measured: With --all: train the measured entries too.
        output: Folder for pictures, and for the page of --all.
    """
    from pipefit.reproduce.lectures import ENTRIES, find_entry
    from pipefit.reproduce.lectures_page import lectures_page
    from pipefit.reproduce.outcome import run_all, run_entry, tally

    if all and name is not None:
        raise PipefitError(f"--all makes every entry: leave out {name}")
    if measured and not all:
        raise PipefitError("--measured: expected --all too; a measured entry is trained when it is given by name")
    if name == PUBLISHED:
        return _published(output)
    if name is not None:
        with Heartbeat(sys.stderr) as heartbeat:
            heartbeat.doing(name)
            found = run_entry(find_entry(name))
        written: Sequence[Path] = ()
        if output is not None:
            written = found.save(output)
        return Answer(found.as_dict(), found.text, output=written)
    if not all:
        if output is not None:
            raise PipefitError("-o: expected a name, or --all")
        return _listed()
    chosen = [entry for entry in ENTRIES.values() if measured or entry.kind != "measured"]
    with Heartbeat(sys.stderr) as heartbeat:
        outcomes = run_all(chosen, heartbeat.doing)
    page = None
    if output is not None:
        page = write_atomically(output / "index.html", lectures_page(outcomes))
    data = {"entries": [each.as_dict() for each in outcomes], "counts": tally(outcomes).as_dict()}
    return Answer(data, lambda: _summary(outcomes), output=page)


def _published(output: Path | None) -> Answer:
    """Published runs next to their predictions."""
    from pipefit.reproduce.run_scores import published_runs

    with Heartbeat(sys.stderr) as heartbeat:
        found = published_runs(heartbeat.doing)
    picture = None
    if output is not None:
        picture = write_atomically(output / f"{PUBLISHED}.svg", found.svg())
    return Answer(found.as_dict(), found.text, output=picture)


def _listed() -> Answer:
    from pipefit.reproduce.entry import KINDS
    from pipefit.reproduce.lectures import DECKS

    lines = []
    data = []
    for deck, entries in DECKS.items():
        lines += ["", deck, *columns([(f"  {each.name}", each.kind, each.line) for each in entries])]
        for each in entries:
            data.append({"deck": deck, **picked(each, "name", "topic", "line", "kind", "source")})
    kinds = [f"{kind}: {words}" for kind, words in KINDS.items()]
    more = f"{PUBLISHED}: training runs that others have published, next to their predictions"
    return Answer({"entries": data}, "\n".join([*lines[1:], "", *kinds, "", more]))


def _summary(outcomes: Sequence[Outcome]) -> str:
    from pipefit.reproduce.outcome import HEADER, row_of, tally

    rows = [["", *HEADER]]
    for outcome in outcomes:
        rows += [[outcome.entry.name, *row_of(each)] for each in outcome.values]
    seconds = sum(outcome.seconds for outcome in outcomes)
    last = f"{counted(len(outcomes), 'entry', 'entries')} in {seconds:.1f} s: {tally(outcomes).text}"
    return "\n".join([*columns(rows), "", last])
