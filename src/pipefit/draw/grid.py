"""A timeline in the terminal: one line per rank, one or more columns per unit of time."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from pipefit.draw.axes import label_number, nice_ticks, time_scale
from pipefit.draw.caption import counts, duration, measures, peak_words, title_of
from pipefit.draw.look import FAMILIES
from pipefit.draw.scene import COPIED, Box, Scene, scene_of
from pipefit.timeline import Timeline
from pipefit.units import terminal_width

_IDLE = "·"
_LINE = "─"
Paint = Callable[[Box | None, str], str]


class _Columns(NamedTuple):
    """The columns of the time axis.

    Attributes:
        per_second: their number for a second.
        length: their number for the whole timeline.
        labelled: whether every cell has room for its label.
        exact: whether every cell has a column.
    """

    per_second: float
    length: int
    labelled: bool
    exact: bool


def grid(timeline: Timeline, width: int | None = None, color: bool | None = None, seconds: bool | None = None) -> str:
    """The timeline as text.

    Cells hold the letter of their instruction and, where there is room, its micro-batch; a long timeline is scaled
    down until it fits, and a column then shows the instruction that takes most of its time.

    Args:
        timeline: simulated or measured.
        width: columns to use; None: as many as the terminal has.
        color: whether to use ANSI colours; None: when standard output is a terminal and NO_COLOR is not set.
        seconds: whether times are real seconds; None: when the timeline was measured.
    """
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if width is None:
        width = terminal_width()
    scene = scene_of(timeline, seconds)
    width = max(width, 40)
    paint = _plain
    if color:
        paint = _painted
    names = [f"rank {rank}" for rank in range(scene.num_ranks)]
    gutter = max(map(len, names)) + 2
    peaks = [peak_words(scene, rank) for rank in range(scene.num_ranks)]
    right = max(map(len, ["peak", *peaks])) + 2
    columns = _columns(scene, width - gutter - right - 1)
    head = f"{title_of(scene.facts.schedule)}  {counts(scene)}  ({scene.timeline.source})"
    above = " " * (gutter + columns.length) + "peak".rjust(right)
    lines = [head, "", above]
    for rank, name in enumerate(names):
        row = _row(scene, rank, columns, paint)
        peak = peaks[rank].rjust(right)
        lines.append(f"{name:<{gutter}}{row}{peak}")
        lines += _copy_rows(scene, rank, columns, gutter)
    lines += [
        _axis(scene, columns, gutter),
        "",
        _legend(scene, columns, paint),
        *wrap(measures(scene), width),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _columns(scene: Scene, room: int) -> _Columns:
    """The shortest cell gets a whole number of columns where that fits, so that equal cells look equal."""
    makespan = scene.facts.makespan_s or 1.0
    unit = min((box.duration_s for box in scene.cells), default=1.0)
    longest = max((len(_label(box, scene)) for box in scene.cells), default=1)
    per_second = max(room, 10) / makespan
    each = 0
    for count in range(longest + 1, 0, -1):
        if makespan * count / unit <= room:
            per_second = count / unit
            each = count
            break
    length = max(round(scene.facts.makespan_s * per_second), 1)
    return _Columns(per_second, length, labelled=each >= longest, exact=each > 0)


def _row(scene: Scene, rank: int, columns: _Columns, paint: Paint) -> str:
    owners = _owners([box for box in scene.of(rank) if box.letter != "S"], columns)
    out = []
    for _, shown in groupby(owners, key=id):
        owner, *more = shown
        run = 1 + len(more)
        text = _IDLE * run
        if owner is not None:
            text = _text(owner, run, scene, columns)
        out.append(paint(owner, text))
    return "".join(out)


def _copy_rows(scene: Scene, rank: int, columns: _Columns, gutter: int) -> list[str]:
    """A line for each lane of copies and of steps on the host; what is too short for a column is left out."""
    lines = []
    for lane in scene.lanes:
        row = [_IDLE] * columns.length
        for bar in scene.bars:
            if bar.rank != rank or bar.lane != lane:
                continue
            start = round(bar.start_s * columns.per_second)
            end = min(round(bar.end_s * columns.per_second), columns.length)
            room = end - start
            label = bar.short
            if len(label) > room:
                label = label[0] * room
            row[start:end] = _filled(label, room)
        if set(row) != {_IDLE}:
            name = f" {lane}".ljust(gutter)
            lines.append(name + "".join(row))
    return lines


def _owners(boxes: list[Box], columns: _Columns) -> list[Box | None]:
    """The box that each column shows; None where the rank is idle.

    A column that several kinds share shows the one that has had the smallest part of its share so far. So over many
    columns each kind, and idle time, gets columns in proportion to its time.
    """
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(columns.length)]
    shown: list[dict[str, tuple[float, Box]]] = [{} for _ in filled]
    for box in boxes:
        start = box.start_s * columns.per_second
        end = box.end_s * columns.per_second
        first = int(start + 1e-9)
        last = int(end - 1e-9)
        for column in range(first, min(last + 1, columns.length)):
            covered = min(end, column + 1) - max(start, column)
            filled[column][box.letter] += covered
            most, _ = shown[column].get(box.letter, (0.0, box))
            if covered > most:
                shown[column][box.letter] = covered, box
    owners = []
    due: dict[str, float] = defaultdict(float)
    for kinds, best in zip(filled, shown, strict=True):
        idle = 1 - sum(kinds.values())
        if idle > 1e-9:
            kinds[_IDLE] = idle
        for kind, covered in kinds.items():
            due[kind] += covered
        chosen = max(kinds, key=due.__getitem__)
        due[chosen] -= 1
        _, owner = best.get(chosen, (0.0, None))
        owners.append(owner)
    return owners


def _label(box: Box, scene: Scene) -> str:
    if scene.facts.num_chunks > 1:
        return box.short
    return f"{box.letter}{box.mb}"


def _text(box: Box, room: int, scene: Scene, columns: _Columns) -> str:
    """A cell: its label, then a line up to its end, so that long cells show where they begin."""
    if columns.labelled:
        return _filled(_label(box, scene), room)
    rest = box.letter
    if columns.exact:
        rest = _LINE
    return box.letter + rest * (room - 1)


def _filled(label: str, room: int) -> str:
    spare = room - len(label)
    if spare > 0:
        return label + _LINE * (spare - 1) + " "
    return label


def _plain(box: Box | None, text: str) -> str:
    return text


def _painted(box: Box | None, text: str) -> str:
    if box is None:
        return f"\x1b[2m{text}\x1b[0m"
    back, front = FAMILIES[box.letter].terminal[box.chunk % 2]
    shown = text
    if box.mb >= 0:
        # The colour shows the kind, so the small space is for the micro-batch, or its last digit.
        number = str(box.mb)
        room = len(text)
        shown = number[-room:].center(room)
    return f"\x1b[48;5;{back}m\x1b[38;5;{front}m{shown}\x1b[0m"


def _axis(scene: Scene, columns: _Columns, gutter: int) -> str:
    factor, unit = time_scale(scene.facts.makespan_s, scene.unit)
    row = [" "] * (gutter + columns.length + 12)
    end = 0
    for tick in nice_ticks(scene.facts.makespan_s * factor, max(columns.length // 14, 2)):
        at = gutter + round(tick / factor * columns.per_second)
        label = label_number(tick)
        if at >= end:
            end = at + len(label)
            row[at:end] = label
            end += 1
    return f"{''.join(row).rstrip()} {unit}".rstrip()


def _legend(scene: Scene, columns: _Columns, paint: Paint) -> str:
    parts = []
    for letter in scene.letters:
        if letter != "S":
            sample = next(box for box in scene.boxes if box.letter == letter)
            parts.append(f"{paint(sample._replace(mb=-1), f' {letter} ')}{FAMILIES[letter].name}")
    parts += [f"{letter} {name}" for letter, name in COPIED.items() if letter in scene.copied]
    parts.append(f"{_IDLE} idle")
    parts.append(f"column: {duration(1 / columns.per_second, scene.unit)}")
    if paint is _plain:
        parts = [part.strip() for part in parts]
    return "  ".join(parts)
