"""Chains of waits, as a user of `waited_for` follows them."""

from __future__ import annotations

from operator import attrgetter

from pipefit.ir.op import Lane
from pipefit.timeline import Event, Timeline, waited_for


def chain(timeline: Timeline) -> list[Event]:
    """The events that determine the makespan, in the order of time: back from the work or the copy that ends last.

    A message appears as its receive, and also as its send where the sender issued last.
    """
    lanes = (Lane.COMPUTE, Lane.COPY) if timeline.program.header.spill else (Lane.COMPUTE,)
    ending = (event for event in timeline.events if timeline.lane(event) in lanes)
    current = max(ending, key=attrgetter("end_s"), default=None)
    path: list[Event] = []
    while current is not None:
        path.append(current)
        assert len(path) <= len(timeline.events)
        current = waited_for(timeline, current).by
    return path[::-1]
