"""What a picture shows, before it is decided how: boxes on ranks, thin bars beside them, numbers for the caption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipefit.ir.graph import Graph, dependency_graph
from pipefit.ir.instruction import Instruction
from pipefit.ir.liveness import peak_inflight, weight_versions
from pipefit.ir.op import OP_SPEC, Lane, Op
from pipefit.ir.program import Header, WeightRule
from pipefit.timeline import Event, Timeline

__all__ = ["COPY_LANES", "HOST_LANE", "Box", "Facts", "Scene", "Thin", "scene_of"]

COPY_LANES = ("fetch", "evict")
"""The lanes of copies, in the order in which they are drawn below a rank."""
HOST_LANE = "host"
"""The lane below those, of steps on the host."""


class Box(NamedTuple):
    """An instruction that takes time on a rank and has a letter; times count from the start of the timeline."""

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

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def short(self) -> str:
        """As in listings: "F0.3", and "S0" for an optimizer step."""
        return f"{self.letter}{self.stage}" + (f".{self.mb}" if self.mb >= 0 else "")


_MOVED = {"weights": "w", "optim": "o", "wgrad": "g"}


class Thin(NamedTuple):
    """A message on its way to a rank, a reduction, or a copy: what runs beside the boxes.

    `kind` is "act", "grad", "reduce", "fetch", "evict" or "host" (an optimizer's step there); of a copy, `what` is
    "weights", "optim" or the like, and `mb` the micro-batch of activations.
    """

    rank: int
    kind: str
    label: str
    start_s: float
    end_s: float
    stage: int = -1
    what: str = ""
    mb: int = -1
    position: int = -1
    repeat: int = 0

    @property
    def short(self) -> str:
        """A copy in a few letters: "w3" moves the weights of stage 3, o states, g gradients, a activations.

        "S3" is the step of stage 3 on the host.
        """
        letter = "S" if self.kind == HOST_LANE else _MOVED.get(self.what, "a")
        return f"{letter}{self.stage}"


@dataclass(frozen=True)
class Facts:
    """The numbers of a caption. Counts and shapes are the header's; times are those of the timeline.

    `peak_bytes` of each rank is known where memory was followed and times are real. `spill` says in words what is
    spilled, and `slots` through how many places of a device; 0: nothing is.
    """

    schedule: str
    depth: int
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_steps: int
    source: str
    is_synchronous: bool
    makespan_s: float
    bubble_fraction: float
    bubble_over_ideal: float
    peak_inflight: tuple[float, ...]
    weight_versions: tuple[int, ...]
    peak_bytes: tuple[float, ...] = ()
    spill: str = ""
    slots: int = 0


@dataclass(frozen=True)
class Scene:
    """A timeline, ready to be drawn.

    Attributes:
        timeline: what is drawn.
        boxes: by rank, then in time; a box's number is its place here.
        first: number of each rank's first box, and at the end how many there are.
        stages: of each rank.
        facts: the caption.
        unit: "s" when times are seconds, "" when they are units of a forward or the like.
    """

    timeline: Timeline
    boxes: tuple[Box, ...]
    first: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    facts: Facts
    unit: str
    letters: tuple[str, ...]

    @cached_property
    def thin(self) -> tuple[Thin, ...]:
        """Messages, reductions and copies."""
        return _thin(self.timeline)

    @cached_property
    def copies(self) -> tuple[Thin, ...]:
        """What is fetched and evicted, in a program that spills: by rank, lane and time."""
        if self.timeline.program.header.spill is None:
            return ()
        found = [bar for bar in self.thin if bar.kind in COPY_LANES]
        return tuple(sorted(found, key=lambda bar: (bar.rank, COPY_LANES.index(bar.kind), bar.start_s, bar.position)))

    @cached_property
    def host_steps(self) -> tuple[Thin, ...]:
        """The optimizer's steps on the host, where a program takes some there."""
        return tuple(bar for bar in self.thin if bar.kind == HOST_LANE)

    @cached_property
    def beside(self) -> tuple[Thin, ...]:
        """Copies and steps on the host, by rank, lane and time."""
        order = (*COPY_LANES, HOST_LANE)
        found = (*self.copies, *self.host_steps)
        return tuple(sorted(found, key=lambda bar: (bar.rank, order.index(bar.kind), bar.start_s, bar.position)))

    @property
    def lanes(self) -> tuple[str, ...]:
        """What runs beside the computation of each rank, in a program that spills."""
        return (*(COPY_LANES if self.copies else ()), *((HOST_LANE,) if self.host_steps else ()))

    @cached_property
    def items(self) -> tuple[Box | Thin, ...]:
        """The boxes, and after them what runs beside them: all that a reader can ask about."""
        return *self.boxes, *self.beside

    @property
    def num_ranks(self) -> int:
        """How many rows there are."""
        return len(self.stages)

    def of(self, rank: int) -> tuple[Box, ...]:
        """The boxes of a rank."""
        return self.boxes[self.first[rank] : self.first[rank + 1]]

    @property
    def is_plain(self) -> bool:
        """Whether every rank has just the stage of its own number."""
        return all(own == (rank,) for rank, own in enumerate(self.stages))

    @property
    def shows_versions(self) -> bool:
        """Whether the version of the weights is worth a label: backwards and forwards of several versions meet."""
        return not self.facts.is_synchronous


def scene_of(timeline: Timeline, seconds: bool | None = None) -> Scene:
    """The scene of a timeline.

    Args:
        timeline: simulated or measured.
        seconds: whether its times are real seconds; None: they are when it was measured.
    """
    program, zero = timeline.program, timeline.start_s
    stages = tuple(program.header.stages_of(rank) for rank in range(len(program.ranks)))
    chunk_of = [{stage: place for place, stage in enumerate(own)} for own in stages]
    rows: list[list[Box]] = [[] for _ in stages]
    for event in timeline.events:
        i = program.ranks[event.rank][event.position]
        letter = OP_SPEC[i.op].letter
        if letter:
            chunk = chunk_of[event.rank].get(i.stage, 0)
            times = event.start_s - zero, event.end_s - zero
            rows[event.rank].append(
                Box(event.rank, event.position, event.repeat, letter, i.stage, i.mb, i.version, chunk, *times)
            )
    first = [0]
    for row in rows:
        row.sort(key=lambda box: (box.repeat, box.position))
        first.append(first[-1] + len(row))
    boxes = tuple(box for row in rows for box in row)
    seconds = timeline.source == "measured" if seconds is None else seconds
    used = {box.letter for box in boxes}
    letters = tuple(spec.letter for spec in OP_SPEC.values() if spec.letter in used)
    return Scene(
        timeline,
        boxes,
        tuple(first),
        stages,
        _facts(timeline, seconds),
        "s" if seconds else "",
        letters,
    )


def _facts(timeline: Timeline, seconds: bool) -> Facts:
    header = timeline.program.header
    makespan, bubble = timeline.makespan_s, timeline.bubble_fraction
    ideal = makespan * (1 - bubble)
    program, ranks = timeline.program, range(len(timeline.program.ranks))
    chunks = max(header.num_chunks, 1)
    own_updates = header.weights in (WeightRule.STASH, WeightRule.VERTICAL) and header.num_microbatches == 1
    return Facts(
        schedule=header.schedule,
        depth=max(header.num_stages // chunks, 1),
        num_ranks=header.num_ranks,
        num_stages=header.num_stages,
        num_microbatches=header.total_microbatches if own_updates else header.num_microbatches,
        num_chunks=chunks,
        num_steps=1 if own_updates else header.num_steps,
        source=timeline.source,
        is_synchronous=header.weights is WeightRule.FLUSH,
        makespan_s=makespan,
        bubble_fraction=bubble,
        bubble_over_ideal=(makespan - ideal) / ideal if ideal else 0.0,
        peak_inflight=tuple(peak_inflight(program, rank) for rank in ranks),
        weight_versions=tuple(weight_versions(program, rank) for rank in ranks),
        peak_bytes=_peak_bytes(timeline) if seconds else (),
        spill=_spill_words(header),
        slots=header.spill.weights_slots if header.spill else 0,
    )


def _spill_words(header: Header) -> str:
    spill = header.spill
    if spill is None:
        return ""
    slots = f"{spill.weights_slots} slot{'s' if spill.weights_slots > 1 else ''}"
    steps = f" · {len(spill.on_host)} step there" if spill.on_host else ""
    kept = f" · {len(spill.keeps)} keep activations" if spill.keeps else ""
    return f"{len(spill.stages)} stages on the {spill.tier} · {slots}{steps}{kept}"


def _peak_bytes(timeline: Timeline) -> tuple[float, ...]:
    followed = len(timeline.memory) == len(timeline.program.ranks) and all(timeline.memory)
    return tuple(max(size for _, size in samples) for samples in timeline.memory) if followed else ()


def _thin(timeline: Timeline) -> tuple[Thin, ...]:
    zero = timeline.start_s
    graph = dependency_graph(timeline.program)
    at = {(graph.starts[e.rank] + e.position, e.repeat): e for e in timeline.events}
    found = []
    for event in timeline.events:
        i = timeline.program.ranks[event.rank][event.position]
        if OP_SPEC[i.op].lane is Lane.COMPUTE or i.op in (Op.SEND, Op.BARRIER):
            continue
        found.append(_thin_of(event, i, graph, at, zero))
    return tuple(found)


def _thin_of(event: Event, i: Instruction, graph: Graph, at: Mapping[tuple[int, int], Event], zero: float) -> Thin:
    start = event.start_s
    if i.op is Op.RECV:
        # A receive is posted long before; the message is on its way only from its send on.
        number = graph.starts[event.rank] + event.position
        sent = at.get((graph.partner.get(number, -1), event.repeat))
        start = sent.start_s if sent else start
    elif i.op is Op.GATHER:
        # Likewise: it moves once the piece of this process is there.
        pieces = (at.get((pred, event.repeat)) for pred in graph.preds[graph.starts[event.rank] + event.position])
        start = max([start, *(piece.end_s for piece in pieces if piece)])
    names = {Op.REDUCE: "reduce", Op.FETCH: "fetch", Op.EVICT: "evict", Op.HOST_STEP: HOST_LANE}
    kind = names.get(i.op) or ("grad" if i.kind.startswith("grad") else "act")
    moved = (i.stage, i.kind, i.mb) if i.op in (Op.FETCH, Op.EVICT, Op.HOST_STEP) else (-1, "", -1)
    end = max(event.end_s, start) - zero
    return Thin(event.rank, kind, str(i), start - zero, end, *moved, event.position, event.repeat)
