"""Reasons why each item of a scene started when it did: `timeline.path`, followed back to an item.

The items are the boxes, and the copies and steps on the host in the lanes below them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipefit.draw.scene import Scene
from pipefit.ir.op import Lane
from pipefit.timeline.path import waited_for
from pipefit.timeline.timeline import Event, Timeline


class Why(IntEnum):
    """The last thing an item waited for; LANE: another copy was on the lane."""

    START = 0
    RANK = 1
    MESSAGE = 2
    REDUCTION = 3
    COPY = 4
    LANE = 5


class Reason(NamedTuple):
    """The binding predecessor of an item: the reason, and the number of the item that caused the wait (−1: none).

    `waited_s` of a bar counts from when its rank issued it. A box waits as long as its rank is idle before it.
    """

    why: Why
    item: int
    waited_s: float = 0.0


_WHY = {
    "message": Why.MESSAGE,
    "reduction": Why.REDUCTION,
    "copy": Why.COPY,
    "gather": Why.COPY,
    "lane": Why.LANE,
    "link": Why.LANE,
}


def reasons(scene: Scene) -> list[Reason]:
    """The reason of each item of a scene. Where its rank was busy until its start, that is the reason."""
    timeline = scene.timeline
    numbers = {(item.rank, item.repeat, item.position): number for number, item in enumerate(scene.items)}
    return [_reason(timeline, timeline.by_place[place], numbers) for place in numbers]


def _reason(timeline: Timeline, event: Event, numbers: dict[tuple[int, int, int], int]) -> Reason:
    why = Why.START
    current = event
    waited_s = 0.0
    # Loads, losses, messages and drops are not items, and the members of a collective end together: the reason is the
    # item that they waited for.
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
        if number is not None and wait.reason != "member":
            return Reason(why, number, waited_s)
    return Reason(Why.START, -1)
