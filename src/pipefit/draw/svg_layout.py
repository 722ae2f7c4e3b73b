"""Positions and sizes of the vector picture, in pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipefit.draw.caption import stages_words
from pipefit.draw.look import FAMILIES
from pipefit.draw.scene import COPIED, Scene

MARGIN = 24
BAR_HEIGHT = 11
"""Height of a copy in its lane."""
PEAK_WIDTH = 72
"""Width of the bar of a rank's peak, in the memory strip."""
WEIGHTS_OFFSET = PEAK_WIDTH + 8 + 34.0
"""From the memory strip's left edge to its column of weight versions."""
_LANE_PITCH = BAR_HEIGHT + 2


class Item(NamedTuple):
    """An entry of the legend: its swatches, its words, and its place."""

    classes: tuple[str, ...]
    words: str
    swatch: int = 14
    thin: bool = False
    x: float = 0.0
    line: int = 0


@dataclass(frozen=True)
class Layout:
    """Positions and sizes of one picture.

    Attributes:
        scale: pixels per second.
        num_lanes: lanes below each rank, as in the scene, or where a device computes; the last one has the launches.
        number_size: font size of the numbers in cells; 0 when they do not fit.
        version_size: font size of the weight versions below them.
        versions: whether cells are labelled with their weight version.
        foot: below the last row.
        bytes_offset: the distance from the memory strip's left edge to its column of bytes.
    """

    left: int
    top: float
    plot_width: float
    scale: float
    num_ranks: int
    cell_height: int
    row_gap: int
    num_lanes: int
    number_size: float
    version_size: float
    versions: bool
    memory_width: float
    bytes_offset: float
    legend: tuple[Item, ...]
    foot: int = 0
    curve: int = 0

    def x(self, time_s: float) -> float:
        """The horizontal place of a time since the start: proportional to it."""
        return self.left + self.scale * time_s

    def y(self, rank: int) -> float:
        """The top of a rank's row."""
        return self.top + rank * self.pitch

    @property
    def pitch(self) -> int:
        """From the top of one row to the next."""
        lanes = self.num_lanes * _LANE_PITCH
        if lanes:
            lanes += 3
        return self.cell_height + lanes + self.curve + self.row_gap

    def curve_y(self, rank: int) -> float:
        """The bottom of the curve of a rank's memory, which is below its lanes."""
        return self.y(rank) + self.pitch - self.row_gap

    def lane_y(self, rank: int, number: int) -> float:
        """The top of a lane below a rank, by its number."""
        return self.y(rank) + self.cell_height + 3 + number * _LANE_PITCH

    @property
    def bottom(self) -> float:
        """The end of the last row."""
        return self.top + self.num_ranks * self.pitch - self.row_gap + self.foot

    @property
    def memory_left(self) -> float:
        """The left edge of the memory strip."""
        return self.left + self.plot_width + 28

    @property
    def width(self) -> float:
        """Width of the whole picture."""
        return self.left + self.plot_width + self.memory_width + MARGIN

    @property
    def height(self) -> float:
        """Height of the whole picture."""
        return self.bottom + 40 + 20 * self.legend[-1].line + 12 + MARGIN


_CURVE_HEIGHT = 26
"""Of a rank's memory over time, with the gap above it."""


def layout_of(scene: Scene, width: float | None, room: int = 0) -> Layout:
    """The layout of a scene: of that width, or, without one, wide enough for its numbers where that is possible."""
    facts = scene.facts
    versions = not facts.is_synchronous
    longest = 0
    if not scene.is_plain:
        longest = max(len(stages_words(stages)) for stages in scene.stages)
    left = MARGIN + max(62, int(5.7 * longest) + 16)
    memory_width = 28.0 + PEAK_WIDTH + 8 + 30
    bytes_offset = WEIGHTS_OFFSET
    if any(facts.kept_inputs):
        memory_width += 30
    if max(facts.weight_versions, default=1) > 1:
        memory_width += 68
        bytes_offset += 72
    if facts.peak_bytes:
        memory_width += 68
    span = facts.makespan_s or 1.0
    typical, digits = _typical_cell(scene)
    if width is None:
        wanted = (6.4 * digits + 4.5) * span / typical
        # Legible numbers have priority, but a picture should not be wider than three screens.
        plot = min(max(wanted, 560.0), 2700.0)
    else:
        plot = max(width - left - memory_width - MARGIN, 120.0)
    cell = typical * plot / span
    size = min((cell - 2) / (0.6 * digits), 11.0)
    number_size = 0.0
    if size >= 6.0:
        number_size = int(10 * size) / 10
    version_size = int(10 * (cell - 2) / (0.62 * (digits + 1))) / 10
    cell_height = 28
    if versions:
        cell_height = 34
    row_gap = 7
    if scene.bars:
        row_gap = 10
    curve = 0
    if facts.peak_bytes:
        curve = _CURVE_HEIGHT
    items = _legend_items(scene, versions, number_size > 0)
    return Layout(
        left=left,
        top=MARGIN + 76.0,
        plot_width=plot,
        scale=plot / span,
        num_ranks=scene.num_ranks,
        cell_height=cell_height,
        row_gap=room or row_gap,
        num_lanes=len(scene.lanes) + bool(scene.timeline.launches),
        number_size=number_size,
        version_size=min(7.6, version_size),
        versions=versions,
        memory_width=memory_width,
        bytes_offset=bytes_offset,
        legend=_placed(items, plot + memory_width),
        foot=room,
        curve=curve,
    )


def _typical_cell(scene: Scene) -> tuple[float, int]:
    """The duration that nine of ten cells reach, and the digits of the highest number."""
    lengths = sorted(box.duration_s for box in scene.cells)
    typical = 1.0
    if lengths:
        typical = lengths[len(lengths) // 10]
    highest = max([0, *(box.mb for box in scene.boxes)])
    return typical, len(str(highest))


def _legend_items(scene: Scene, versions: bool, numbers: bool) -> Iterator[Item]:
    for letter in scene.letters:
        words = FAMILIES[letter].name
        many = 1
        if letter != "S":
            many = scene.facts.num_chunks
        swatch = 14
        if many > 1:
            words += f", chunk 0 to {many - 1}"
            swatch = 9
        yield Item(tuple(f"{letter}{chunk}" for chunk in range(many)), words, swatch)
    yield Item(("lane",), "idle")
    if scene.copied:
        for lane in scene.lanes:
            if lane != "host":
                yield Item((lane,), lane, thin=True)
        copies = [f"{key} {name}" for key, name in COPIED.items() if key in scene.copied]
        yield Item((), "copies: " + ", ".join(copies))
    if numbers and versions:
        yield Item((), "number: micro-batch, w: weight version")
    elif numbers:
        yield Item((), "number: micro-batch")


def _placed(items: Iterator[Item], width: float) -> tuple[Item, ...]:
    placed = []
    x = 0.0
    line = 0
    for item in items:
        swatches = (item.swatch + 1) * len(item.classes) + 5
        length = swatches + 6.6 * len(item.words)
        if x and x + length > width:
            x = 0.0
            line += 1
        placed.append(item._replace(x=x, line=line))
        x += length + 18
    return tuple(placed)
