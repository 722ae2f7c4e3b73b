"""Whether the host keeps up with a device: the host launches computations, and the device computes them later.

host      launch a | launch b | launch c |                   the host is ahead: the device is the bottleneck
device             |     a     |     b     |     c     |

host      |  launch a  |  launch b  |  launch c  |           the device ends with each launch: the host is
device      |   a      |    b       |    c       |
"""

from __future__ import annotations

from statistics import median

from pipefit.timeline.timeline import Timeline
from pipefit.units import format_seconds

_AT_ONCE = 0.25
"""A computation that ends within this share of its time after its launch has waited for the host."""
_BOUND = 0.5
"""The share of the computing time in such computations beyond which the host is the bottleneck."""


def bottleneck(timeline: Timeline) -> str:
    """A sentence about the host as a bottleneck; "": its own processors computed."""
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
        return ""
    waiting = waiting_s / whole_s
    if waiting > _BOUND:
        return (
            f"the host is the bottleneck: for {waiting:.0%} of their computing time, devices were done as soon as the "
            "host had launched their work; larger micro-batches or compile=True give them more work for each launch"
        )
    behind = format_seconds(max(median(ahead), 0.0))
    return (
        f"the host is not the bottleneck: a device ends a computation {behind} after its launch (median), and waited "
        f"for the host in {waiting:.0%} of its computing time"
    )
