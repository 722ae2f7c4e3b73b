"""Memory over time as a snapshot of torch's allocator, which the page pytorch.org/memory_viz opens.

Each rank is a device, each value an allocation with its name as the stack. Addresses are not used again: the picture
shows how much is held, not where.
"""

from __future__ import annotations

import pickle
from operator import itemgetter
from pathlib import Path

from pipefit.cost.model import CostModel
from pipefit.simulate.occupancy import stays_of
from pipefit.spec.files import JsonObject, write_atomically
from pipefit.timeline.timeline import Timeline


def memory_snapshot(timeline: Timeline, cost: CostModel) -> JsonObject:
    """The snapshot of a timeline, in the form of those that torch makes of a GPU's memory.

    Args:
        timeline: simulated or measured, with all its events.
        cost: bytes of the values.
    """
    ranks = range(len(timeline.program.ranks))
    return {"segments": [], "device_traces": [_trace(timeline, cost, rank) for rank in ranks]}


def save_snapshot(timeline: Timeline, cost: CostModel, path: str | Path) -> Path:
    """Writes the snapshot as the pickle that torch writes, atomically."""
    return write_atomically(path, pickle.dumps(memory_snapshot(timeline, cost)))


def _trace(timeline: Timeline, cost: CostModel, rank: int) -> list[JsonObject]:
    """The events of a device in order."""
    changes = []
    end = 0
    for stay in stays_of(timeline, cost, rank):
        size = round(stay.size_bytes)
        name = str(stay.value or "states of the optimizer, and what else stays")
        frames = [{"name": name, "filename": f"rank {rank}", "line": 0}]
        common = {"addr": end, "size": size, "stream": 0, "frames": frames}
        end += size
        changes.append((stay.start_s, 1, {"action": "alloc", **common}))
        if stay.end_s is not None:
            changes.append((stay.end_s, 0, {"action": "free_requested", **common}))
            changes.append((stay.end_s, 0, {"action": "free_completed", **common}))
    changes.sort(key=itemgetter(0, 1))
    found = []
    for time_s, _, change in changes:
        found.append({**change, "time_us": round(time_s * 1e6)})
    return found
