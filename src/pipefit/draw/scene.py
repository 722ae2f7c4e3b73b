"""The content of a picture, before its layout: boxes on ranks, bars of copies below them, numbers for the caption."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.liveness import kept_inputs, peak_inflight, weight_versions
from pipefit.ir.op import OP_SPEC, Op, Reduction
from pipefit.ir.program import Header, WeightRule
from pipefit.spec.plan import Figures
from pipefit.timeline import Timeline
from pipefit.timeline.path import waited_for
from pipefit.units import counted

LANES = ("fetch", "evict", "host", "gather", "sum")
"""The lanes below a rank, in the order in which they are drawn: three where stages are spilled, of which the last one
has the optimizer's steps on the host, and two where copies of a stage share something."""
_LANE_OF: dict[str, str] = dict(
    zip((Op.FETCH, Op.EVICT, Op.HOST_STEP, Op.UNSHARD, Reduction.SCATTER), LANES, strict=True)
)
_LANE_OF[Reduction.SHARDS] = "gather"
_JOINED = {"gather": "weights", "sum": "wgrad"}


_MOVED = {"weights": "w", "optim": "o", "wgrad": "g"}
COPIED = {"w": "weights", "o": "optimizer states", "g": "gradients", "a": "activations"}
"""The letters of copies, and their meaning."""


class Box(NamedTuple):
    """An instruction that takes time on a rank and has a letter; times count from the start of the timeline.

    A bar is a box in one of `LANES`: a copy of `what` ("weights", "optim", …) between device and tier, or between the
    copies of a stage from when the last of them has come to it, or a step on the host. `mb` of a copy is the
    micro-batch of activations.
    """

    rank: int
    position: int
    repeat: int
    letter: str
    stage: int
    mb: int
    version: int
    chunk: int
    start_s: float
    end_s: float
    lane: str = ""
    what: str = ""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def short(self) -> str:
        """As in listings: "F0.3", "S0" for an optimizer step; "w3" moves the weights of stage 3."""
        if self.lane or self.mb < 0:
            return f"{self.letter}{self.stage}"
        return f"{self.letter}{self.stage}.{self.mb}"


@dataclass(frozen=True)
class Facts:
    """The numbers of a caption. Counts and shapes are the header's; times are the timeline's.

    `peak_bytes` of each rank is known where the timeline has its memory and times are real. `spill` describes the
    spilled stages; `slots` is their number of slots on a device, 0 without spilling. `kept_inputs` are inputs of stages
    that ranks hold for replays; where stages spill, they may be elsewhere.
    """

    schedule: str
    depth: int
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_steps: int
    is_synchronous: bool
    makespan_s: float
    bubble_fraction: float
    bubble_over_ideal: float
    peak_inflight: Figures
    weight_versions: Indices
    kept_inputs: Indices
    peak_bytes: Figures = ()
    spill: str = ""
    slots: int = 0


@dataclass(frozen=True)
class Scene:
    """A timeline, ready to be drawn.

    Attributes:
        timeline: that is drawn.
        boxes: all boxes by rank, then in time; a box's number is its place here.
        bars: copies and steps on the host, where stages are spilled or shared: by rank, lane and time.
        first: number of each rank's first box, and at the end how many there are.
        stages: the stages of each rank.
        facts: the caption.
        unit: "s" when times are seconds, "" when they are units of a forward or the like.
        letters: the letters of the boxes, in the order of the legend.
        scale_s: the time that sets the unit of its numbers: its makespan, or a longer picture's next to it.
    """

    timeline: Timeline
    boxes: tuple[Box, ...]
    bars: tuple[Box, ...]
    first: Indices
    stages: tuple[Indices, ...]
    facts: Facts
    unit: str
    letters: tuple[str, ...]
    scale_s: float

    @cached_property
    def copied(self) -> frozenset[str]:
        """The letters of the copies."""
        return frozenset(bar.letter for bar in self.bars if bar.lane != "host")

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes below each rank."""
        used = {bar.lane for bar in self.bars}
        return tuple(lane for lane in LANES if lane in used)

    @property
    def cells(self) -> list[Box]:
        """The boxes with a length: all but steps, which take almost no time."""
        return [box for box in self.boxes if box.letter != "S" and box.duration_s > 0]

    @cached_property
    def items(self) -> tuple[Box, ...]:
        """The boxes, then the bars: all items that a reader can point at."""
        return *self.boxes, *self.bars

    @property
    def num_ranks(self) -> int:
        """The number of rows."""
        return len(self.stages)

    def of(self, rank: int) -> tuple[Box, ...]:
        """The boxes of a rank."""
        return self.boxes[self.first[rank] : self.first[rank + 1]]

    @property
    def is_plain(self) -> bool:
        """Returns whether every rank has only the stage of its number."""
        return all(held == (rank,) for rank, held in enumerate(self.stages))


def _letter(i: Instruction, lane: str, what: str) -> str:
    if lane == "host":
        return "S"
    if lane:
        return _MOVED.get(what, "a")
    return OP_SPEC[i.op].letter


def _within(timeline: Timeline, time_s: float) -> float:
    """A time from the start of a timeline on; what joins weights may begin before it and end after it."""
    return min(max(time_s, timeline.start_s), timeline.end_s) - timeline.start_s


def scene_of(timeline: Timeline, seconds: bool | None = None, scale_s: float = 0.0) -> Scene:
    """The scene of a timeline.

    Args:
        timeline: simulated or measured.
        seconds: whether its times are real seconds; None: they are when it was measured.
        scale_s: makespan of a picture next to it, for one unit in both.
    """
    program = timeline.program
    stages = tuple(map(program.header.stages_of, range(len(program.ranks))))
    chunk_of = [{stage: chunk for chunk, stage in enumerate(held)} for held in stages]
    boxes = []
    bars = []
    for event in timeline.events:
        i = timeline.instruction(event)
        rank = event.rank
        lane = _LANE_OF.get(i.op, "") or _LANE_OF.get(i.kind, "")
        what = _JOINED.get(lane, i.kind)
        letter = _letter(i, lane, what)
        if not letter:
            continue
        chunk = chunk_of[rank].get(i.stage, 0)
        start_s = event.start_s
        if lane in _JOINED:
            start_s += waited_for(timeline, event).waited_s
        box = Box(
            rank,
            event.position,
            event.repeat,
            letter,
            i.stage,
            i.mb,
            i.version,
            chunk,
            _within(timeline, start_s),
            _within(timeline, event.end_s),
            lane,
        )
        if lane:
            bars.append(box._replace(what=what))
        else:
            boxes.append(box)
    bars.sort(key=lambda bar: (bar.rank, LANES.index(bar.lane), bar.start_s, bar.position))
    first = [bisect_left(boxes, rank, key=attrgetter("rank")) for rank in range(len(stages) + 1)]
    if seconds is None:
        seconds = timeline.source == "measured"
    used = {box.letter for box in boxes}
    letters = tuple(spec.letter for spec in OP_SPEC.values() if spec.letter in used)
    unit = ""
    if seconds:
        unit = "s"
    facts = _facts(timeline, seconds)
    scale = max(scale_s, facts.makespan_s)
    return Scene(timeline, tuple(boxes), tuple(bars), tuple(first), stages, facts, unit, letters, scale)


def _facts(timeline: Timeline, seconds: bool) -> Facts:
    program = timeline.program
    header = program.header
    ranks = range(len(program.ranks))
    chunks = max(header.num_chunks, 1)
    num_microbatches = header.num_microbatches
    num_steps = header.num_steps
    if header.weights in (WeightRule.STASH, WeightRule.VERTICAL) and num_microbatches == 1:
        # Each micro-batch is a step.
        num_microbatches = header.total_microbatches
        num_steps = 1
    kept = [0] * len(ranks)
    slots = 0
    if header.spill is None:
        kept = [kept_inputs(program, rank) for rank in ranks]
    else:
        slots = header.spill.weights_slots
    peak_bytes: Figures = ()
    if seconds:
        peak_bytes = _peak_bytes(timeline)
    return Facts(
        schedule=header.schedule,
        depth=max(header.num_stages // chunks, 1),
        num_stages=header.num_stages,
        num_microbatches=num_microbatches,
        num_chunks=chunks,
        num_steps=num_steps,
        is_synchronous=header.weights is WeightRule.FLUSH,
        makespan_s=timeline.makespan_s,
        bubble_fraction=timeline.bubble_fraction,
        bubble_over_ideal=timeline.bubble_over_ideal,
        peak_inflight=tuple(peak_inflight(program, rank) for rank in ranks),
        weight_versions=tuple(weight_versions(program, rank) for rank in ranks),
        kept_inputs=tuple(kept),
        peak_bytes=peak_bytes,
        spill=_spill_words(header),
        slots=slots,
    )


def _spill_words(header: Header) -> str:
    spill = header.spill
    if spill is None:
        return ""
    words = f"{len(spill.stages)} stages on the {spill.tier} · {counted(spill.weights_slots, 'slot')}"
    if spill.on_host:
        words += f" · {len(spill.on_host)} step there"
    if spill.keeps:
        words += f" · {len(spill.keeps)} keep activations"
    return words


def _peak_bytes(timeline: Timeline) -> Figures:
    if len(timeline.memory) < len(timeline.program.ranks) or not all(timeline.memory):
        return ()
    return tuple(map(timeline.peak_bytes, range(len(timeline.memory))))
