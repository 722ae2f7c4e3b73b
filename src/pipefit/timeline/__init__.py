"""Times of instructions, simulated or measured, and figures computed from them."""

from pipefit.timeline.compare import KindTimes, Row, by_kind, compare
from pipefit.timeline.launches import bottleneck
from pipefit.timeline.path import Wait, waited_for
from pipefit.timeline.timeline import Event, Timeline
from pipefit.timeline.trace import from_chrome_trace, load_trace, save_trace, to_chrome_trace
