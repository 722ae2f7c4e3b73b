"""Why each item of a scene started when it did: what `timeline.path` says of events, followed back to the last item.

The items are the boxes and, where a program spills, its copies and steps on the host.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipefit.draw.scene import Scene
from pipefit.ir.op import Lane
from pipefit.timeline.path import waited_for
from pipefit.timeline.timeline import Event, Timeline

__all__ = ["Reason", "Why", "critical_path", "reasons"]


class Why(IntEnum):
    """What an item waited for last; LANE: another copy was on the lane."""

    START = 0
    RANK = 1
    MESSAGE = 2
    REDUCTION = 3
    COPY = 4
    LANE = 5


class Reason(NamedTuple):
    """The binding predecessor of an item: why, and the number of the item it goes back to (−1: none).

    `waited_s` of what is no box counts from when its rank asked for it. A box waits as long as its rank is idle
    before it.
    """

    why: Why
    item: int
    waited_s: float = 0.0


_WHY = {"message": Why.MESSAGE, "reduction": Why.REDUCTION, "copy": Why.COPY, "lane": Why.LANE}


def reasons(scene: Scene) -> list[Reason]:
    """For each item of a scene, what it waited for last. A rank that was busy until the start is the reason."""
    timeline = scene.timeline
    numbers = {(item.rank, item.repeat, item.position): number for number, item in enumerate(scene.items)}
    return [_reason(timeline, timeline.by_place[place], numbers) for place in numbers]


def _reason(timeline: Timeline, event: Event, numbers: dict[tuple[int, int, int], int]) -> Reason:
    why, current, waited_s = Why.START, event, 0.0
    # Loads, losses, messages and drops are no items: what they waited for is what the item waited for.
    for _ in timeline.events:
        wait = waited_for(timeline, current)
        if current is event and timeline.lane(event) is not Lane.COMPUTE:
            waited_s = wait.waited_s
        if wait.by is None:
            return Reason(Why.START, -1)
        if why in (Why.START, Why.RANK):
            why = _WHY.get(wait.reason, Why.RANK)
        current = wait.by
        number = numbers.get((current.rank, current.repeat, current.position))
        if number is not None:
            return Reason(why, number, waited_s)
    return Reason(Why.START, -1)


def critical_path(scene: Scene, found: list[Reason] | None = None) -> list[int]:
    """Numbers of the items that decide the makespan, the first one first."""
    found = reasons(scene) if found is None else found
    # A step that takes no time ends with the backward before it; the later one of a rank is the end of the chain.
    at = max(range(len(found)), key=lambda number: (scene.items[number].end_s, number), default=-1)
    path: list[int] = []
    while at >= 0 and len(path) <= len(found):
        path.append(at)
        at = found[at].item
    return path[::-1]
