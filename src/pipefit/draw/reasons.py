"""Why a box started when it did, box by box: what `timeline.path` says of events, followed back to the last box."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipefit.draw.scene import Scene
from pipefit.timeline.path import waited_for
from pipefit.timeline.timeline import Event, Timeline

__all__ = ["Reason", "Why", "critical_path", "reasons"]


class Why(IntEnum):
    """What a box waited for last."""

    START = 0
    RANK = 1
    MESSAGE = 2
    REDUCTION = 3
    COPY = 4


class Reason(NamedTuple):
    """The binding predecessor of a box: why, and the number of the box it goes back to (−1: none)."""

    why: Why
    box: int


_WHY = {"message": Why.MESSAGE, "reduction": Why.REDUCTION, "copy": Why.COPY}


def reasons(scene: Scene) -> list[Reason]:
    """For each box of a scene, what it waited for last. A rank that was busy until the start is the reason."""
    timeline = scene.timeline
    numbers = {(box.rank, box.repeat, box.position): number for number, box in enumerate(scene.boxes)}
    return [_reason(timeline, timeline.by_place[place], numbers) for place in numbers]


def _reason(timeline: Timeline, event: Event, numbers: dict[tuple[int, int, int], int]) -> Reason:
    why, current = Why.START, event
    # Loads, losses and messages are no boxes: what they waited for is what the box waited for.
    for _ in timeline.events:
        wait = waited_for(timeline, current)
        if wait.by is None:
            return Reason(Why.START, -1)
        if why in (Why.START, Why.RANK):
            why = _WHY.get(wait.reason, Why.RANK)
        current = wait.by
        number = numbers.get((current.rank, current.repeat, current.position))
        if number is not None:
            return Reason(why, number)
    return Reason(Why.START, -1)


def critical_path(scene: Scene, found: list[Reason] | None = None) -> list[int]:
    """Numbers of the boxes that decide the makespan, the first one first."""
    found = reasons(scene) if found is None else found
    # A step that takes no time ends with the backward before it; the later one of a rank is the end of the chain.
    at = max(range(len(found)), key=lambda number: (scene.boxes[number].end_s, number), default=-1)
    path: list[int] = []
    while at >= 0 and len(path) <= len(found):
        path.append(at)
        at = found[at].box
    return path[::-1]
