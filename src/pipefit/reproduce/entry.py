"""An entry: a figure, table or number of a lecture, its values to compare, and the calls that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pipefit.errors import InfeasibleError

if TYPE_CHECKING:
    from pipefit.reproduce.steps import Draw, Step

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
        commands: of the steps since the record was cleared.
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

    def fits(self, step: Step) -> bool:
        """Returns whether a plan is feasible."""
        try:
            self(step)
        except InfeasibleError:
            return False
        return True


@dataclass(frozen=True)
class Value:
    """A value that is made again.

    Attributes:
        name: what it is.
        published: None: the lecture shows it without a number.
        unit: "%": both are fractions; else it follows the number.
        within: largest |ours / published − 1| that counts as agreement; 0: all printed digits.
        why: named cause of a difference.
        source: of the published value, where it is not that of the entry.
        sort: of the published value; None: nothing is published.
    """

    name: str
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
    return "trend" if isinstance(published, bool) else "choice"


@dataclass(frozen=True)
class Picture:
    """A picture, and its content as text.

    Attributes:
        title: of the picture.
        svg: makes it.
        text: a grid, or a table of the points.
    """

    title: str
    svg: Callable[[], str]
    text: str


class Made:
    """How an entry is made again; nothing here reads a published value.

    Attributes:
        values: compute ours, in the order of the entry's values.
        pictures: draw.
    """

    def __init__(self, values: Sequence[Callable[[Bench], Scalar]] = (), *pictures: Callable[[Bench], Picture]) -> None:
        self.values, self.pictures = values, pictures


_NOT_MADE = Made()


@dataclass(frozen=True)
class Entry:
    """A figure, table or number of a lecture.

    Attributes:
        name: for `pipefit reproduce NAME`.
        topic: of the slide.
        line: its content in one line.
        kind: how it is made again.
        source: of its published values.
        values: to compare.
        note: what to know about the comparison; of a cited entry, the reason why it is not run.
        like: name of an earlier entry that this one repeats; "": none.
        made: how it is made again.
    """

    name: str
    topic: str
    line: str
    kind: Kind
    source: str
    values: tuple[Value, ...] = ()
    note: str = ""
    like: str = ""
    made: Made = _NOT_MADE


def drawn(step: Draw, title: str = "", **options: Any) -> Callable[[Bench], Picture]:
    """The picture of a schedule; options as for `pipefit.draw.svg`."""

    def make(run: Bench) -> Picture:
        drawing = run(step)
        svg = partial(drawing.svg, **options, **({"title": title} if title else {}))
        return Picture(title or step.command, svg, drawing.grid(width=120, color=False))

    return make


def figure(step: Draw, name: str, of: Callable[[Any], Any] = lambda found: found) -> Callable[[Bench], Any]:
    """A figure of a schedule by its name in `pipefit draw --json`; of figures of every rank, one, such as the max."""
    return lambda run: of(run(step).metrics[name])


def each(value: Callable[[Bench, Any], Scalar], over: Iterable[Any]) -> list[Callable[[Bench], Scalar]]:
    """The value of an entry at each of several points."""
    return [lambda run, x=x: value(run, x) for x in over]


def curves(
    title: str,
    x_label: str,
    y_label: str,
    over: Sequence[float | str],
    lines: Mapping[str, Callable[[Bench, Any], float]],
    published: Mapping[str, Sequence[float | None]] | None = None,
    courses: Mapping[str, Callable[[Bench], list[tuple[Any, float]]]] | None = None,
    **options: Any,
) -> Callable[[Bench], Picture]:
    """A chart of functions of x; points without a feasible plan are left out.

    Args:
        title: of the chart.
        x_label: under the axis.
        y_label: next to it.
        over: the values of x.
        lines: a function of bench and x for each line.
        published: for each published line its y at every x; None: there is none.
        courses: further lines, each with points of its own.
        options: as for `pipefit.draw.chart`.
    """
    from pipefit.draw.chart import chart
    from pipefit.units import columns

    def make(run: Bench) -> Picture:
        series: dict[str, list[tuple[Any, float]]] = {name: [] for name in lines}
        for name, line in lines.items():
            for x in over:
                try:
                    series[name].append((x, float(line(run, x))))
                except InfeasibleError:
                    continue
        for name, ys in (published or {}).items():
            series[f"{name}, published"] = [(x, y) for x, y in zip(over, ys, strict=True) if y is not None]
        series |= {name: course(run) for name, course in (courses or {}).items()}
        series = {name: points for name, points in series.items() if points}
        rows = [[x_label, *series]]
        for x in over or sorted({x for points in series.values() for x, _ in points}):
            rows.append(
                [shown(x), *(shown(dict(points)[x]) if x in dict(points) else "" for points in series.values())]
            )
        svg = partial(chart, series, title=title, x_label=x_label, y_label=y_label, **options)
        return Picture(title, svg, "\n".join([f"{title} ({y_label})", *columns(rows, right=True)]))

    return make


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
    number = f"{100 * value:.1f}" if unit == "%" else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".strip()
