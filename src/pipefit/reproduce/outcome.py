"""Entries run: values next to the published ones, pictures, and both as text, JSON and files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipefit.draw.chart import can_plot
from pipefit.errors import InfeasibleError, PipefitError
from pipefit.reproduce.entry import KINDS, SORTS, Bench, Entry, Make, Picture, Scalar, Sort, Value, shown
from pipefit.reproduce.lectures import deck_of
from pipefit.run.observer import Say
from pipefit.spec.files import JsonObject, write_atomically
from pipefit.units import columns


@dataclass(frozen=True)
class Compared:
    """A value of ours next to the published one.

    Attributes:
        value: the declaration.
        ours: made again; "does not fit" where no plan is feasible.
    """

    value: Value
    ours: Scalar

    @property
    def ratio(self) -> float | None:
        """Ours over the published one; None where these are not two numbers."""
        ours = self.ours
        published = self.value.published
        if not _is_number(ours) or not _is_number(published) or not published:
            return None
        return float(ours) / float(published)

    @property
    def agrees(self) -> bool | None:
        """Returns whether both agree; None: nothing is published."""
        published = self.value.published
        ratio = self.ratio
        if published is None:
            return None
        if ratio is None:
            return self.ours == published
        return abs(ratio - 1) <= (self.value.within or 1e-9)

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "agrees", False: "differs", None: ""}[self.agrees]

    def as_dict(self) -> JsonObject:
        """As JSON data."""
        value = self.value
        return {
            "name": value.name,
            "published": value.published,
            "ours": self.ours,
            "ratio": self.ratio,
            "sort": value.sort,
            "agrees": self.agrees,
            "unit": value.unit,
            "why": value.why if self.agrees is False else "",
        }


def _is_number(value: Scalar | None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Outcome:
    """An entry that was run.

    Attributes:
        entry: the declaration.
        values: next to the published ones.
        pictures: drawn.
        commands: that a user would give for the same.
        seconds: that it took.
    """

    entry: Entry
    values: tuple[Compared, ...]
    pictures: tuple[Picture, ...]
    commands: tuple[str, ...]
    seconds: float

    def as_dict(self) -> JsonObject:
        """As JSON data."""
        data: JsonObject = {"deck": deck_of(self.entry)}
        for name in ("name", "topic", "line", "kind", "source", "note", "like"):
            data[name] = getattr(self.entry, name)
        data["values"] = [each.as_dict() for each in self.values]
        data["commands"] = self.commands
        return data

    @property
    def text(self) -> str:
        """For people."""
        entry = self.entry
        lines = [f"{deck_of(entry)}: {entry.topic}", entry.line]
        lines += [f"({entry.kind}: {KINDS[entry.kind]})", ""]
        if self.values:
            rows = [row_of(each) for each in self.values]
            lines += [*columns([HEADER, *rows]), ""]
        for each in self.values:
            if each.agrees is False:
                lines.append(f"{each.value.name}: {each.value.why}")
        if entry.note:
            lines.append(entry.note)
        for picture in self.pictures:
            lines += ["", picture.text.rstrip()]
        lines += ["", f"source: {entry.source}", *self.commands]
        return "\n".join(lines)

    def save(self, folder: Path) -> list[Path]:
        """Writes its pictures into a folder.

        Raises:
            PipefitError: a chart, and matplotlib is not installed.
        """
        written = []
        for number, picture in enumerate(self.pictures, 1):
            if number > 1:
                end = f"-{number}"
            else:
                end = ""
            path = folder / f"{self.entry.name}{end}.svg"
            written.append(write_atomically(path, picture.svg()))
        return written


@dataclass
class Tally:
    """How many values agree, by their sort.

    Attributes:
        agreeing: the number of each sort that agree.
        judged: the number of each sort.
        shown: the number of values without a published one.
        repeated: the number of values in entries that repeat another, which are not counted again.
    """

    agreeing: Counter[Sort] = field(default_factory=Counter)
    judged: Counter[Sort] = field(default_factory=Counter)
    shown: int = 0
    repeated: int = 0

    @property
    def text(self) -> str:
        """In one sentence for each."""
        counts = [f"{self.agreeing[sort]} of {self.judged[sort]} {sort}s" for sort in SORTS]
        others = f"{self.shown} values have no published one; {self.repeated} repeat others"
        return f"{', '.join(counts)} agree; {others}"

    def as_dict(self) -> JsonObject:
        """As JSON data."""
        data: JsonObject = {"without_published": self.shown, "repeated": self.repeated}
        for sort in SORTS:
            data[sort] = {"agree": self.agreeing[sort], "of": self.judged[sort]}
        return data


def tally(outcomes: Iterable[Outcome]) -> Tally:
    """Counts the values of entries, and apart from them the values of repeating entries."""
    found = Tally()
    for outcome in outcomes:
        if outcome.entry.like:
            found.repeated += len(outcome.values)
            continue
        for each in outcome.values:
            sort = each.value.sort
            if sort is None:
                found.shown += 1
            else:
                found.judged[sort] += 1
                found.agreeing[sort] += each.agrees is True
    return found


HEADER = ["", "published", "ours", "ratio", ""]
"""Names of the columns of `row_of`."""


def row_of(each: Compared) -> list[str]:
    """Name, published, ours, ratio and verdict in words."""
    value = each.value
    published = shown(value.published, value.unit)
    ours = shown(each.ours, value.unit)
    if each.ratio is None:
        ratio = ""
    else:
        ratio = f"{each.ratio:.2f}"
    return [value.name, published, ours, ratio, each.verdict]


def run_entry(entry: Entry, bench: Bench | None = None) -> Outcome:
    """Makes an entry again.

    Args:
        entry: the entry to run.
        bench: that has run other entries, whose steps need not be repeated.

    Raises:
        PipefitError: a step failed; the message names it.
    """
    bench = bench or Bench()
    bench.commands = []
    began = time.perf_counter()
    values = [Compared(value, _ours(value.make, bench)) for value in entry.values]
    pictures = [make(bench) for make in entry.pictures]
    seconds = time.perf_counter() - began
    return Outcome(entry, tuple(values), tuple(pictures), tuple(bench.commands), seconds)


def _ours(make: Make, bench: Bench) -> Scalar:
    try:
        return make(bench)
    except InfeasibleError:
        return "does not fit"


def run_all(entries: Iterable[Entry], say: Say | None = None) -> list[Outcome]:
    """Makes entries again, with common steps only once.

    Args:
        entries: the entries to run.
        say: is given the name of each entry before it runs.
    """
    bench = Bench()
    found = []
    for entry in entries:
        if say is not None:
            say(entry.name)
        found.append(run_entry(entry, bench))
    return found


def picture_svg(picture: Picture) -> str:
    """The picture; "" for a chart where matplotlib is not installed."""
    try:
        return picture.svg()
    except PipefitError:
        if can_plot():
            raise
        return ""
