"""Contents of a device's slots over time: the memory of a program that spills."""

from __future__ import annotations

from typing import NamedTuple

from pipefit.draw.scene import Scene
from pipefit.ir.op import Kind, Op

_KINDS = (Kind.WEIGHTS.value, Kind.OPTIM.value)  # gradients have a second slot next to the slot of their weights


class Stay(NamedTuple):
    """A stage's weights or optimizer states in a slot, from the begin of their fetch until the slot is free again."""

    rank: int
    kind: str
    slot: int
    stage: int
    start_s: float
    end_s: float


def stays_of(scene: Scene) -> list[Stay]:
    """Every stay on every rank, by rank, kind and slot; times count from the start of the timeline."""
    timeline = scene.timeline
    zero = scene.timeline.start_s
    found = []
    held = {}
    newest = {}
    for event in timeline.events:
        i = timeline.instruction(event)
        op = i.op
        rank = event.rank
        place = (rank, i.stage)
        if op is Op.FETCH and i.kind in _KINDS:
            held[rank, i.kind, i.stage] = Stay(rank, i.kind, i.slot, i.stage, event.start_s - zero, 0.0)
            newest[place] = i.version
        elif op is Op.STEP:
            newest[place] = i.version + 1
        elif op is Op.EVICT or (op is Op.DROP and newest.get(place) == i.version):
            # After a drop of an older version the slot holds the newer one, in the same place.
            kind = Kind.WEIGHTS.value
            if op is Op.EVICT:
                kind = i.kind
            stay = held.pop((rank, kind, i.stage), None)
            if stay:
                found.append(stay._replace(end_s=event.end_s - zero))
    found += [stay._replace(end_s=scene.facts.makespan_s) for stay in held.values()]
    return sorted(found, key=lambda stay: (stay.rank, _KINDS.index(stay.kind), stay.slot, stay.start_s))
