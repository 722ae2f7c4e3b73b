"""When instructions ran, simulated or measured, and what that says."""

from pipefit.timeline.compare import KindTimes, Row, compare
from pipefit.timeline.path import Wait
from pipefit.timeline.timeline import Event, Timeline
from pipefit.timeline.trace import from_chrome_trace, load_trace, save_trace, to_chrome_trace

__all__ = [
    "Event",
    "KindTimes",
    "Row",
    "Timeline",
    "Wait",
    "compare",
    "from_chrome_trace",
    "load_trace",
    "save_trace",
    "to_chrome_trace",
]
