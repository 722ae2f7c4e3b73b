"""Entries run: values next to the published ones, pictures, and both as text, JSON and files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit.draw.chart import can_plot
from pipefit.errors import InfeasibleError, PipefitError
from pipefit.reproduce.entry import KINDS, SORTS, Bench, Entry, Picture, Scalar, Sort, Value, shown
from pipefit.reproduce.lectures import deck_of
from pipefit.spec.files import write_atomically
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
        ours, published = self.ours, self.value.published
        if isinstance(ours, bool | str) or isinstance(published, bool | str) or not published:
            return None
        return float(ours) / float(published)

    @property
    def agrees(self) -> bool | None:
        """Returns whether both agree; None: nothing is published."""
        published, ratio = self.value.published, self.ratio
        if published is None:
            return None
        if ratio is None:
            return self.ours == published
        return abs(ratio - 1) <= (self.value.within or 1e-9)

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "agrees", False: "differs", None: ""}[self.agrees]

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        value = self.value
        data = {"name": value.name, "published": value.published, "ours": self.ours, "ratio": self.ratio}
        data["sort"] = value.sort
        return data | {"agrees": self.agrees, "unit": value.unit, "why": value.why if self.agrees is False else ""}


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

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        same = {name: getattr(self.entry, name) for name in ("name", "topic", "line", "kind", "source", "note", "like")}
        values = [each.as_dict() for each in self.values]
        return {"deck": deck_of(self.entry), **same, "values": values, "commands": self.commands}

    @property
    def text(self) -> str:
        """For people."""
        entry = self.entry
        lines = [f"{deck_of(entry)}: {entry.topic}", entry.line, f"({entry.kind}: {KINDS[entry.kind]})", ""]
        if self.values:
            rows = [["", "published", "ours", "ratio", ""], *(row_of(each) for each in self.values)]
            lines += [*columns(rows), ""]
        for each in self.values:
            lines += [f"{each.value.name}: {each.value.why}"] if each.agrees is False else []
        lines += [entry.note] * bool(entry.note)
        for picture in self.pictures:
            lines += ["", picture.text.rstrip()]
        lines += ["", f"source: {entry.source}", *self.commands]
        return "\n".join(lines)

    def save(self, folder: Path) -> list[Path]:
        """Writes its pictures into a folder.

        Raises:
            PipefitError: a chart, and matplotlib is not installed.
        """
        ends = ["", *(f"-{number}" for number in range(2, len(self.pictures) + 1))]
        each = zip(ends, self.pictures, strict=False)
        return [write_atomically(folder / f"{self.entry.name}{end}.svg", picture.svg()) for end, picture in each]


@dataclass(frozen=True)
class Tally:
    """How many values agree, by their sort.

    Attributes:
        agreeing: of each sort.
        judged: of each sort, that have a published value.
        shown: without a published value.
        repeated: in entries that repeat another; they are counted once.
    """

    agreeing: Mapping[Sort, int]
    judged: Mapping[Sort, int]
    shown: int
    repeated: int

    @property
    def text(self) -> str:
        """In one sentence for each."""
        counts = ", ".join(f"{self.agreeing[sort]} of {self.judged[sort]} {sort}s" for sort in SORTS)
        return f"{counts} agree; {self.shown} values have no published one; {self.repeated} repeat others"

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        sorts = {sort: {"agree": self.agreeing[sort], "of": self.judged[sort]} for sort in SORTS}
        return {**sorts, "without_published": self.shown, "repeated": self.repeated}


def tally(outcomes: Iterable[Outcome]) -> Tally:
    """Counts the values of entries, those of repeating entries apart."""
    agreeing: Counter[Sort] = Counter()
    judged: Counter[Sort] = Counter()
    shown = repeated = 0
    for outcome in outcomes:
        if outcome.entry.like:
            repeated += len(outcome.values)
            continue
        for each in outcome.values:
            if each.value.sort is None:
                shown += 1
                continue
            judged[each.value.sort] += 1
            agreeing[each.value.sort] += each.agrees is True
    return Tally(agreeing, judged, shown, repeated)


def row_of(each: Compared) -> list[str]:
    """Name, published, ours, ratio and verdict in words."""
    value, ratio = each.value, each.ratio
    cells = [shown(value.published, value.unit), shown(each.ours, value.unit)]
    return [value.name, *cells, f"{ratio:.2f}" if ratio is not None else "", each.verdict]


def run_entry(entry: Entry, bench: Bench | None = None) -> Outcome:
    """Makes an entry again.

    Args:
        entry: to run.
        bench: that has run other entries, whose steps need not be repeated.

    Raises:
        PipefitError: a step failed; the message names it.
    """
    bench = bench or Bench()
    bench.commands, began = [], time.perf_counter()
    both = zip(entry.values, entry.made.values, strict=True)
    values = tuple(Compared(value, _ours(make, bench)) for value, make in both)
    pictures = tuple(make(bench) for make in entry.made.pictures)
    return Outcome(entry, values, pictures, tuple(bench.commands), time.perf_counter() - began)


def _ours(make: Callable[[Bench], Scalar], bench: Bench) -> Scalar:
    try:
        return make(bench)
    except InfeasibleError:
        return "does not fit"


def run_all(entries: Iterable[Entry], say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Makes entries again, with common steps only once.

    Args:
        entries: to run.
        say: is given the name of each entry before it runs.
    """
    bench, found = Bench(), []
    for entry in entries:
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
