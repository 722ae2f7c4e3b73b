"""Whether the host keeps up with a device: the host launches computations, and the device computes them later.

host      launch a | launch b | launch c |                   the host is ahead: the device is the bottleneck
device             |     a     |     b     |     c     |

host      |  launch a  |  launch b  |  launch c  |           the device ends with each launch: the host is
device      |   a      |    b       |    c       |
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from pipefit.timeline.timeline import Timeline
from pipefit.units import format_seconds

_AT_ONCE = 0.25
"""A computation that ends within this share of its time after its launch has waited for the host."""


class Launching(NamedTuple):
    """The host's launches next to the computations of the devices.

    Attributes:
        waiting: share of the devices' computing time in computations that ended as soon as they were launched.
        ahead_s: median seconds from the end of a launch to the end of its computation.
    """

    waiting: float
    ahead_s: float

    @property
    def is_host_bound(self) -> bool:
        """Whether the host is the bottleneck."""
        return self.waiting > 0.5


def launching(timeline: Timeline) -> Launching | None:
    """The launches of a measured timeline; None: the processors of the host computed."""
    if not timeline.launches:
        return None
    ahead = []
    waiting_s = 0.0
    whole_s = 0.0
    for launch in timeline.launches:
        event = timeline.by_place[launch.rank, launch.repeat, launch.position]
        whole_s += event.duration_s
        ahead.append(event.end_s - launch.end_s)
        if ahead[-1] <= _AT_ONCE * event.duration_s:
            waiting_s += event.duration_s
    if not whole_s:
        return None
    return Launching(waiting_s / whole_s, median(ahead))


def bottleneck(timeline: Timeline) -> str:
    """A sentence about the host as a bottleneck; "": its own processors computed."""
    found = launching(timeline)
    if found is None:
        return ""
    waiting = f"{found.waiting:.0%}"
    if found.is_host_bound:
        return (
            f"the host is the bottleneck: for {waiting} of their computing time, devices were done as soon as the host "
            "had launched their work; larger micro-batches or compile=True give them more work for each launch"
        )
    behind = format_seconds(max(found.ahead_s, 0.0))
    return (
        f"the host is not the bottleneck: a device ends a computation {behind} after its launch (median), and waited "
        f"for the host in {waiting} of its computing time"
    )
