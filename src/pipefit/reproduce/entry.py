"""An entry: a figure, table or number of a lecture, its values to compare, and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipefit.errors import InfeasibleError

if TYPE_CHECKING:
    from pipefit.reproduce.steps import Step

Scalar = float | str | bool
Kind = Literal["drawn", "computed", "measured", "cited"]
Sort = Literal["formula", "number", "choice", "trend"]

KINDS: Mapping[Kind, str] = {
    "drawn": "exact: a schedule, under the costs of the slide",
    "computed": "predicted from profiles and machines",
    "measured": "trained on this machine",
    "cited": "not run here",
}
"""Every kind with its meaning."""

SORTS: Mapping[Sort, str] = {
    "formula": "a formula, rule or count of the source, exactly",
    "number": "a measured figure, within 15 % at most",
    "choice": "a plan or a setting, exactly",
    "trend": "a statement, yes or no",
}
"""Every sort of published value with what agreement means."""

MOST_WITHIN = 0.15
"""The largest tolerance of a number; what is known less well is a trend."""


class Bench:
    """Runs steps, each once, and records their commands.

    Attributes:
        commands: the commands of the steps since the record was cleared.
    """

    def __init__(self) -> None:
        self.commands: list[str] = []
        self._done: dict[Step, Any] = {}

    def __call__(self, step: Step) -> Any:
        """The result of a step; an `InfeasibleError` is raised again for every caller."""
        if step.command not in self.commands:
            self.commands.append(step.command)
        if step not in self._done:
            try:
                self._done[step] = step.run()
            except InfeasibleError as problem:
                self._done[step] = problem
        if isinstance(self._done[step], InfeasibleError):
            raise self._done[step]
        return self._done[step]


Make = Callable[[Bench], Scalar]
"""A way to make a value; it raises `InfeasibleError` where no plan fits."""


@dataclass(frozen=True)
class Value:
    """A value that is made again.

    Attributes:
        name: its name, unique in the entry.
        make: computes ours; nothing in it reads a published value.
        published: None: the lecture shows it without a number.
        unit: "%": both are fractions; else it follows the number.
        within: largest |ours / published − 1| that counts as agreement; 0: all printed digits.
        why: named cause of a difference.
        source: source of the published value, where it is not the entry's.
        sort: sort of the published value; None: nothing is published.
    """

    name: str
    make: Make
    published: Scalar | None = None
    unit: str = ""
    within: float = 0.0
    why: str = ""
    source: str = ""
    sort: Sort | None = None


def sort_of(published: Scalar | None, within: float, kind: Kind) -> Sort | None:
    """The sort of a published value, by its type, its tolerance and the kind of its entry."""
    if published is None:
        return None
    if within:
        return "number"
    if kind == "drawn":
        return "formula"
    if isinstance(published, bool):
        return "trend"
    return "choice"


@dataclass(frozen=True)
class Picture:
    """A picture, and its content as text.

    Attributes:
        title: its title.
        svg: makes it.
        text: a grid, or a table of the points.
    """

    title: str
    svg: Callable[[], str]
    text: str


@dataclass(frozen=True)
class Entry:
    """A figure, table or number of a lecture.

    Attributes:
        name: the NAME of `pipefit reproduce NAME`.
        topic: topic of the slide.
        line: its content in one line.
        kind: how it is made again.
        source: source of its published values.
        values: values to compare.
        pictures: functions that draw.
        note: what to know about the comparison; of a cited entry, the reason why it is not run.
        like: name of an earlier entry that this one repeats; "": none.
    """

    name: str
    topic: str
    line: str
    kind: Kind
    source: str
    values: tuple[Value, ...] = ()
    pictures: tuple[Callable[[Bench], Picture], ...] = ()
    note: str = ""
    like: str = ""


def shown(value: Scalar | None, unit: str = "") -> str:
    """A value for people.

    >>> shown(0.375, "%"), shown(5.28, "×"), shown(True), shown(None)
    ('37.5 %', '5.28 ×', 'yes', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit == "%":
        return f"{100 * value:.1f} %"
    if abs(value) >= 1000:
        number = f"{value:,.0f}"
    else:
        number = f"{value:.3g}"
    return f"{number} {unit}".strip()
