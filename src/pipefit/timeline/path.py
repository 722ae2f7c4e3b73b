"""Reasons of start times: the binding predecessor of each event."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from pipefit.ir.graph import Graph, dependency_graph
from pipefit.ir.op import COPY_OPS, Lane, Op, Reduction
from pipefit.timeline.timeline import Event, Timeline

_end = attrgetter("end_s")


class Wait(NamedTuple):
    """The reason why an event did not start earlier.

    Attributes:
        reason: "start": nothing came before it; "rank": its rank was busy with `by`; "message", "reduction" or "copy":
            a value it needs arrived with `by`; "sender", "receiver" or "member": that side, `by`, issued it last;
            "link": another message or collective, `by`, was on the link, in the group or at the port; "lane": another
            copy, `by`, was on the lane.
        by: the event that delayed it; None at the start.
        waited_s: idle seconds of the rank before it on the compute lane; otherwise seconds from its issuing to the
            end of the wait for `by`.
    """

    reason: str
    by: Event | None
    waited_s: float


def waited_for(timeline: Timeline, event: Event) -> Wait:
    """The last condition for an event to start, and the event that fulfilled it."""
    if timeline.lane(event) is Lane.COMPUTE:
        return _work_waited_for(timeline, event)
    if timeline.lane(event) is Lane.COPY:
        return _copy_waited_for(timeline, event)
    return _message_waited_for(timeline, event)


def _work_waited_for(timeline: Timeline, event: Event) -> Wait:
    before = _held_before(timeline, event)
    free = _free_s(timeline, before)
    issued = timeline.by_place.get(_place_before(timeline, event))
    if issued is not None and issued is not before and timeline.lane(issued) is not Lane.COPY:
        free = max(free, issued.start_s)
    arrival = _last_arrival(timeline, event)
    waited_s = max(event.start_s - free, 0)
    if arrival is not None and arrival.end_s > free:
        return Wait(_name(timeline, arrival), arrival, waited_s)
    if before:
        return Wait("rank", before, waited_s)
    return Wait("start", None, 0)


def _free_s(timeline: Timeline, before: Event | None) -> float:
    """The time at which a rank was done with the work before."""
    if before is None:
        return timeline.start_s
    return before.end_s


def _copy_waited_for(timeline: Timeline, event: Event) -> Wait:
    """The latest of: a value it needs or the freeing of its slot, the copy before it on its lane, and its issuing."""
    found = [(_name(timeline, item), item) for item in _arrivals(timeline, event)]
    before = _held_before(timeline, event)
    if before is not None:
        found.append(("rank", before))
    (lane,) = _lanes(timeline, event)
    ahead = _by_lane(timeline)[lane]
    place = bisect_right(ahead, event.start_s, key=_end)
    earlier = [one for one in ahead[max(place - 2, 0) : place] if one is not event]
    if earlier:
        found.append(("lane", earlier[-1]))
    if not found:
        return Wait("start", None, 0)
    reason, last = max(found, key=lambda one: one[1].end_s)
    asked = _free_s(timeline, before)
    return Wait(reason, last, max(event.start_s - asked, 0))


def _name(timeline: Timeline, event: Event) -> str:
    return _NAMES.get(timeline.instruction(event).op, "copy")


_NAMES = {
    Op.SEND: "message",
    Op.RECV: "message",
    Op.REDUCE: "reduction",
    Op.UNSHARD: "gather",
    Op.BARRIER: "reduction",
}


def _message_waited_for(timeline: Timeline, event: Event) -> Wait:
    sides = _sides(timeline, event)
    if "no_rendezvous" in timeline.notes:
        # The message had started before its receive was posted, unless the receive came last.
        late = [side for side in sides if timeline.instruction(side).op is not Op.RECV or side.start_s >= side.end_s]
        sides = late or sides
    last = max(sides, key=lambda side: (_ready_s(timeline, side), side is event))
    ready = _ready_s(timeline, last)
    ahead = _ahead_on_lane(timeline, event, ready)
    if ahead is not None:
        return Wait("link", ahead, ahead.end_s - event.start_s)
    if last is not event:
        reason = _SIDES.get(timeline.instruction(last).op, "member")
        return Wait(reason, last, max(ready - event.start_s, 0))
    arrival = _last_arrival(timeline, event)
    if arrival is not None and arrival.end_s > event.start_s:
        waited_s = arrival.end_s - event.start_s
        return Wait(_name(timeline, arrival), arrival, waited_s)
    before = _held_before(timeline, event)
    if before is None:
        return Wait("start", None, 0)
    return Wait("rank", before, 0)


_SIDES = {Op.SEND: "sender", Op.RECV: "receiver"}


def _ready_s(timeline: Timeline, side: Event) -> float:
    ends = [arrival.end_s for arrival in _arrivals(timeline, side)]
    return max([side.start_s, *ends])


def _last_arrival(timeline: Timeline, event: Event) -> Event | None:
    return max(_arrivals(timeline, event), key=_end, default=None)


def _arrivals(timeline: Timeline, event: Event) -> list[Event]:
    """The messages, reductions and copies that an event needs."""
    graph, number = _node(timeline, event)
    found = _events(timeline, event.repeat, graph.preds[number])
    return [one for one in found if timeline.lane(one) is not Lane.COMPUTE]


def _node(timeline: Timeline, event: Event) -> tuple[Graph, int]:
    """The dependency graph, and the number of an event's instruction in it."""
    graph = dependency_graph(timeline.program)
    return graph, graph.starts[event.rank] + event.position


def _sides(timeline: Timeline, event: Event) -> list[Event]:
    """The events of all sides of a message or collective, this one first."""
    graph, number = _node(timeline, event)
    others = [side for side in graph.sides(number) if side != number]
    return [event, *_events(timeline, event.repeat, others)]


def _events(timeline: Timeline, repeat: int, numbers: Iterable[int]) -> list[Event]:
    """The events of some instructions of the graph in one pass, where they ran."""
    graph = dependency_graph(timeline.program)
    found = []
    for number in numbers:
        rank, position = graph.place(number)
        event = timeline.by_place.get((rank, repeat, position))
        if event is not None:
            found.append(event)
    return found


_Queue = tuple[object, ...]


def _ahead_on_lane(timeline: Timeline, event: Event, ready: float) -> Event | None:
    """The last user of its link or ports before this one, where this one was ready earlier."""
    found = []
    for lane in _lanes(timeline, event):
        users = _by_lane(timeline).get(lane, [])
        before = bisect_left(users, event.end_s, key=_end) - 1
        if before >= 0 and users[before].end_s > ready:
            found.append(users[before])
    return max(found, key=_end, default=None)


def _lanes(timeline: Timeline, event: Event) -> list[_Queue]:
    """Resources that an event holds: a copy its lane, a message its link, a collective its group, both their ports."""
    i = timeline.instruction(event)
    if i.op in COPY_OPS:
        return [(event.rank, i.op, i.tier)]
    hops = []
    found: list[_Queue] = []
    if i.op is Op.SEND:
        hops = [(event.rank, i.peer)]
    elif i.op is Op.RECV:
        hops = [(i.peer, event.rank)]
    elif i.op in (Op.REDUCE, Op.UNSHARD) and i.kind != Reduction.NORM:
        graph, number = _node(timeline, event)
        members = sorted(graph.ranks[side] for side in graph.sides(number))
        hops = list(zip(members, [*members[1:], members[0]], strict=True))
        found.append((event.rank, *members))
    if "contention" in timeline.notes and i.op not in (Op.REDUCE, Op.UNSHARD):
        found += hops
    unit = int(timeline.notes.get("port_unit", 0))
    if unit:
        for source, target in hops:
            if source // unit != target // unit:
                found += [("out", source // unit), ("in", target // unit)]
    return found


def _by_lane(timeline: Timeline) -> dict[_Queue, list[Event]]:
    """The events of each lane by their end, kept with the timeline; of a message, its send."""
    kept: dict[_Queue, list[Event]] | None = timeline.__dict__.get("_by_lane")
    if kept is None:
        kept = timeline.__dict__["_by_lane"] = defaultdict(list)
        for event in sorted(timeline.events, key=_end):
            if timeline.instruction(event).op is not Op.RECV:
                for lane in _lanes(timeline, event):
                    kept[lane].append(event)
    return kept


def _held_before(timeline: Timeline, event: Event) -> Event | None:
    """The last work of its rank before this event."""
    before = timeline.by_place.get(_place_before(timeline, event))
    while before is not None and timeline.lane(before) is not Lane.COMPUTE:
        before = timeline.by_place.get(_place_before(timeline, before))
    return before


def _place_before(timeline: Timeline, event: Event) -> tuple[int, int, int]:
    """(rank, repeat, position) of the rank's previous instruction; the repeat is negative where there is none."""
    if event.position:
        return event.rank, event.repeat, event.position - 1
    last = len(timeline.program.ranks[event.rank]) - 1
    return event.rank, event.repeat - 1, last
