"""Timelines as compact JSON for the page, and back: integers, eight per box and nine per copy."""

from __future__ import annotations

import json

from pipefit.draw.caption import title_of
from pipefit.draw.reasons import Reason, Why, reasons
from pipefit.draw.scene import Box, Scene
from pipefit.draw.slots import Stay, stays_of
from pipefit.ir.op import Op
from pipefit.spec.files import JsonObject
from pipefit.units import format_bytes

LETTERS = "FRBIWS"
COPIED_KINDS = ("weights", "wgrad", "optim", "act", "input", "", "grad")
"""The kinds of values in copies, by their number in the data (`MOVED` in words.js); "": a step on the host."""
_FINEST = 1_000_000  # ticks of a timeline whose times are not multiples of a simple fraction


def encode_scene(name: str, scene: Scene) -> JsonObject:
    """A scene as JSON data.

    `ranks[r]` has, for each box of rank r: letter, chunk, micro-batch, version, ticks since the end of the previous
    one, its length in ticks, the reason of its wait, and the distance in items to the one it waited for. A tick is
    `tick` seconds. Copies come after all boxes in this count. A program that spills, or whose copies of a stage share
    something, also has `lanes` below the computation and, by rank, the `copies` in them: lane, moved kind (none for a
    step on the host), stage, micro-batch, ticks at its start, of its length and of its wait, reason and distance of the
    wait. One that spills has the contents of each of its `slots`: kind, number, then stage, start and length of each
    stay.
    """
    facts = scene.facts
    found = reasons(scene)
    tick = _tick(scene)
    kept = {}
    if any(facts.kept_inputs):
        kept = {"kept": list(facts.kept_inputs)}
    moved = {}
    if scene.bars:
        moved = _moved(scene, found, tick)
    if facts.slots:
        moved |= _slots(scene, tick)
    return {
        "name": name,
        "p": scene.num_ranks,
        "m": facts.num_microbatches,
        "v": facts.num_chunks,
        "steps": facts.num_steps,
        "source": scene.timeline.source,
        "unit": scene.unit,
        "tick": tick,
        "versioned": not facts.is_synchronous,
        "makespan": facts.makespan_s,
        "bubble": facts.bubble_fraction,
        "over": facts.bubble_over_ideal,
        "messages": sum(i.op is Op.SEND for _, _, i in scene.timeline.program),
        "peak": list(facts.peak_inflight),
        **kept,
        "weights": list(facts.weight_versions),
        "bytes": [format_bytes(size) for size in facts.peak_bytes],
        "stages": [list(stages) for stages in scene.stages],
        "ranks": [_row(scene, rank, found, tick) for rank in range(scene.num_ranks)],
        **moved,
    }


def _moved(scene: Scene, found: list[Reason], tick: float) -> JsonObject:
    copies: list[list[int]] = [[] for _ in scene.stages]
    for number, bar in enumerate(scene.bars, len(scene.boxes)):
        lane = scene.lanes.index(bar.lane)
        kind = COPIED_KINDS.index(bar.what)
        waited = round(found[number].waited_s / tick)
        copies[bar.rank] += (lane, kind, bar.stage, bar.mb, *_ticks(bar, tick), waited)
        copies[bar.rank] += _why(number, found[number])
    return {"lanes": list(scene.lanes), "copies": copies}


def _slots(scene: Scene, tick: float) -> JsonObject:
    spill = scene.timeline.program.header.spill
    assert spill is not None
    stays: list[dict[tuple[str, int], list[int]]] = [{} for _ in scene.stages]
    for stay in stays_of(scene):
        place = (stay.kind, stay.slot)
        row = stays[stay.rank].setdefault(place, [COPIED_KINDS.index(stay.kind), stay.slot])
        row += (stay.stage, *_ticks(stay, tick))
    return {
        "s": spill.weights_slots,
        "tier": spill.tier,
        "slots": [list(rows.values()) for rows in stays],
    }


def _row(scene: Scene, rank: int, found: list[Reason], tick: float) -> list[int]:
    row: list[int] = []
    before = 0
    for number, box in enumerate(scene.of(rank), scene.first[rank]):
        start, length = _ticks(box, tick)
        letter = LETTERS.index(box.letter)
        row += (letter, box.chunk, box.mb, box.version, start - before, length)
        row += _why(number, found[number])
        before = start + length
    return row


def _ticks(item: Box | Stay, tick: float) -> tuple[int, int]:
    """Start and length in ticks."""
    start = round(item.start_s / tick)
    return start, round(item.end_s / tick) - start


def _why(number: int, reason: Reason) -> tuple[int, int]:
    """The reason of an item's wait, and the distance in items to the one it waited for."""
    if reason.why is Why.START:
        return int(reason.why), 0
    return int(reason.why), number - reason.item


def _tick(scene: Scene) -> float:
    """The simplest fraction of a second that all times are multiples of, else a millionth of the makespan."""
    times = {time for item in scene.items for time in (item.start_s, item.end_s)}
    if any(times):
        for parts in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 40, 60, 100):
            scaled = [time * parts for time in times]
            if all(abs(time - round(time)) < 1e-7 for time in scaled):
                return 1 / parts
    return (scene.facts.makespan_s or 1.0) / _FINEST


def to_text(name: str, scene: Scene) -> str:
    """A scene as JSON that is safe inside a script element: no "<" in it, so no text can end the element."""
    data = encode_scene(name or title_of(scene.facts.schedule), scene)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
