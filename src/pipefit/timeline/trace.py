"""Timelines as Chrome traces: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open, and that loads back.

A process is a rank, a thread a lane; the launches by the host of a GPU have a lane, too. Messages and copies that
overlap get further threads, because slices of one thread must not cross. Arrows lead from a send to its receive; a
counter follows the memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from msgspec.structs import asdict

from pipefit.errors import PipefitError
from pipefit.ir import text
from pipefit.ir.graph import dependency_graph
from pipefit.ir.op import Lane, Op
from pipefit.spec.files import JsonObject, read_json, write_atomically
from pipefit.timeline.timeline import Event, Timeline

_FORMAT = "pipefit.timeline/1"
_US = 1e6
_LAUNCH = "launch"
_THREADS = {"compute": 0, "comm": 100, "fetch": 200, "evict": 300, "host_step": 400, _LAUNCH: 500}


def to_chrome_trace(timeline: Timeline) -> JsonObject:
    """A JSON object in Chrome's trace event format (times there in microseconds)."""
    threads = _threads(timeline)
    items = list(_names(timeline, threads))
    items += [_slice(timeline, event, threads[event]) for event in timeline.events]
    items += [_launch(timeline, event) for event in timeline.launches]
    items += _arrows(timeline, threads)
    memory = []
    for rank, samples in enumerate(timeline.memory):
        own = [[float(time), float(size)] for time, size in samples]
        memory.append(own)
        for time, size in own:
            place = {"pid": rank, "tid": 0, "ts": time * _US}
            items.append({"ph": "C", "name": "memory", **place, "args": {"bytes": size}})
    other = {
        "program": text.dump(timeline.program),
        "source": timeline.source,
        "num_repeats": timeline.num_repeats,
        "notes": timeline.notes,
        "memory": memory,
    }
    return {"format": _FORMAT, "displayTimeUnit": "ms", "traceEvents": items, "otherData": other}


def from_chrome_trace(data: object, where: str = "trace") -> Timeline:
    """The timeline of a trace made by `to_chrome_trace`.

    Raises:
        PipefitError: it is not a trace, or malformed.
    """
    found: object = type(data).__name__
    if isinstance(data, dict):
        found = data.get("format")
    if not isinstance(data, dict) or found != _FORMAT:
        raise PipefitError(f'{where}: expected a trace with "format": "{_FORMAT}", got {found!r}')
    try:
        other = data["otherData"]
        program = text.parse(other["program"], f"{where}: program")
        slices = [item for item in data["traceEvents"] if item["ph"] == "X"]
        events = [Event(**item["args"]) for item in slices if item["cat"] != _LAUNCH]
        launches = [Event(**item["args"]) for item in slices if item["cat"] == _LAUNCH]
        memory = tuple(tuple((time, size) for time, size in samples) for samples in other["memory"])
        notes = {str(name): float(value) for name, value in other["notes"].items()}
        repeats = other["num_repeats"]
        timeline = Timeline(program, tuple(events), memory, other["source"], repeats, notes, tuple(launches))
        for event in events + launches:
            timeline.instruction(event)
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        raise PipefitError(f"{where}: malformed trace: {type(problem).__name__}: {problem}") from None
    return timeline


def save_trace(timeline: Timeline, path: str | Path) -> Path:
    """Writes the Chrome trace as JSON, atomically."""
    trace = json.dumps(to_chrome_trace(timeline), separators=(",", ":"))
    return write_atomically(path, trace + "\n")


def load_trace(path: str | Path) -> Timeline:
    """Reads a trace that `save_trace` wrote.

    Raises:
        PipefitError: with the file and the mistake in it.
    """
    return from_chrome_trace(read_json(path, PipefitError), str(path))


def _threads(timeline: Timeline) -> dict[Event, int]:
    """The thread of each event: the first of its lane on which it crosses no other."""
    threads = {}
    free: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in sorted(timeline.events, key=attrgetter("start_s", "end_s")):
        lane = _lane(timeline, event)
        ends = free[event.rank, lane]
        track = 0
        if lane != "compute":
            while track < len(ends) and ends[track] > event.start_s:
                track += 1
        if track == len(ends):
            ends.append(event.end_s)
        ends[track] = event.end_s
        threads[event] = _THREADS[lane] + track
    return threads


def _lane(timeline: Timeline, event: Event) -> str:
    """The lane of an event; copies to the device and back have one each."""
    lane = timeline.lane(event)
    if lane is Lane.COPY:
        return timeline.instruction(event).op.value
    return lane.value


def _names(timeline: Timeline, threads: dict[Event, int]) -> Iterator[JsonObject]:
    header = timeline.program.header
    for rank in range(len(timeline.program.ranks)):
        stages = ", ".join(f"s{stage}" for stage in header.stages_of(rank))
        yield _metadata("process_name", rank, 0, name=f"rank {rank} ({stages})")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    lanes = {(event.rank, thread): _lane(timeline, event) for event, thread in threads.items()}
    lanes |= {(event.rank, _THREADS[_LAUNCH]): _LAUNCH for event in timeline.launches}
    for (rank, thread), lane in sorted(lanes.items()):
        name = lane
        track = thread - _THREADS[lane]
        if track:
            name += f" {track + 1}"
        yield _metadata("thread_name", rank, thread, name=name)
        yield _metadata("thread_sort_index", rank, thread, sort_index=thread)


def _metadata(what: str, rank: int, thread: int, **args: object) -> JsonObject:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _slice(timeline: Timeline, event: Event, thread: int) -> JsonObject:
    i = timeline.instruction(event)
    start = float(event.start_s)
    end = float(event.end_s)
    return {
        "ph": "X",
        "name": str(i),
        "cat": i.op.value,
        "pid": event.rank,
        "tid": thread,
        "ts": start * _US,
        "dur": max(end - start, 0.0) * _US,
        "args": asdict(event) | {"start_s": start, "end_s": end},
    }


def _launch(timeline: Timeline, event: Event) -> JsonObject:
    """The slice of the host's launch of a computation."""
    item = _slice(timeline, event, _THREADS[_LAUNCH])
    return item | {"name": f"launch {item['name']}", "cat": _LAUNCH}


def _arrows(timeline: Timeline, threads: dict[Event, int]) -> Iterator[JsonObject]:
    graph = dependency_graph(timeline.program)
    number = 0
    for event in timeline.events:
        number_of_send = graph.starts[event.rank] + event.position
        partner = graph.partner.get(number_of_send)
        if partner is None or timeline.instruction(event).op is not Op.SEND:
            continue
        rank, position = graph.place(partner)
        receive = timeline.by_place.get((rank, event.repeat, position))
        if receive is not None:
            number += 1
            common = {"name": "message", "cat": "message", "id": number}
            begin = {"pid": event.rank, "tid": threads[event], "ts": float(event.start_s) * _US}
            # An arrow's end belongs to the slice around it, so it points into the receive, not at its very end.
            at = max(event.start_s, receive.start_s)
            end = {"pid": rank, "tid": threads[receive], "ts": float(at) * _US}
            yield {"ph": "s", **begin, **common}
            yield {"ph": "f", "bp": "e", **end, **common}
