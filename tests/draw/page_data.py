"""The data of a page, read as the page's script reads them."""

from collections.abc import Mapping
from typing import Any

from pipefit.draw.encode import COPIED_KINDS, LETTERS
from pipefit.draw.reasons import Reason, Why
from pipefit.draw.scene import Box, Scene

_FIELDS, _COPY_FIELDS = 8, 9


def boxes_in(data: Mapping[str, Any]) -> list[tuple[Box, Reason]]:
    """The boxes, and why each waited."""
    boxes: list[tuple[Box, Reason]] = []
    tick = data["tick"]
    for rank, row in enumerate(data["ranks"]):
        end = 0
        for at in range(0, len(row), _FIELDS):
            letter, chunk, mb, version, gap, length, why, back = row[at : at + _FIELDS]
            start, end = end + gap, end + gap + length
            stage = data["stages"][rank][chunk]
            box = Box(rank, -1, 0, LETTERS[letter], stage, mb, version, chunk, start * tick, end * tick)
            boxes.append((box, Reason(Why(why), len(boxes) - back if why else -1)))
    return boxes


def bars_in(data: Mapping[str, Any]) -> list[tuple[Box, Reason]]:
    """The bars, without labels, and why each waited."""
    bars: list[tuple[Box, Reason]] = []
    tick, first = data["tick"], sum(len(row) for row in data["ranks"]) // _FIELDS
    for rank, row in enumerate(data.get("copies", [])):
        for at in range(0, len(row), _COPY_FIELDS):
            lane, kind, stage, mb, start, length, waited, why, back = row[at : at + _COPY_FIELDS]
            times = start * tick, (start + length) * tick
            what, name = COPIED_KINDS[kind], data["lanes"][lane]
            letter = {"": "S", "weights": "w", "optim": "o", "wgrad": "g"}.get(what, "a")
            bar = Box(rank, -1, 0, letter, stage, mb, 0, 0, *times, name, what)
            by = first + len(bars) - back if why else -1
            bars.append((bar, Reason(Why(why), by, waited * tick)))
    return bars


def critical_path(scene: Scene, found: list[Reason]) -> list[int]:
    """Numbers of the items that decide the makespan, the first one first."""
    # A step that takes no time ends with the backward before it; the later one of a rank is the end of the chain.
    at = max(range(len(found)), key=lambda number: (scene.items[number].end_s, number), default=-1)
    path: list[int] = []
    while at >= 0 and len(path) <= len(found):
        path.append(at)
        at = found[at].item
    return path[::-1]
