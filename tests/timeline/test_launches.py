"""What the host's launches of a device's work say, and that they survive in a file."""

import json

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.timeline.test_timeline import run

from pipefit.draw import svg
from pipefit.timeline import Timeline, bottleneck, from_chrome_trace, to_chrome_trace


def launched(timeline: Timeline, behind: float) -> Timeline:
    """A measured run in which each computation ends some of its own times after its launch."""
    launches = []
    for event, _ in timeline.compute():
        end_s = event.end_s - behind * event.duration_s
        launches.append(replace(event, start_s=end_s - event.duration_s / 2, end_s=end_s))
    return Timeline(timeline.program, timeline.events, source="measured", launches=tuple(launches))


def test_a_device_that_ends_with_each_launch_waits_for_the_host() -> None:
    said = bottleneck(launched(run(), 0.1))
    assert said.startswith("the host is the bottleneck: for 100% of their computing time")


def test_a_device_that_is_behind_its_launches_does_not_wait_for_the_host() -> None:
    said = bottleneck(launched(run(), 3))
    # Forwards take 1 s and backwards 2 s.
    assert said.startswith("the host is not the bottleneck: a device ends a computation 4.5 s after its launch")
    assert said.endswith("waited for the host in 0% of its computing time")


def test_computations_count_by_their_time() -> None:
    timeline = run()
    late = launched(timeline, 3).launches
    soon = launched(timeline, 0.1).launches
    # Half of the computations are forwards, but they take a third of the time.
    mixed = [
        near if timeline.instruction(near).op.value == "fwd" else far for near, far in zip(soon, late, strict=True)
    ]
    said = bottleneck(Timeline(timeline.program, timeline.events, launches=tuple(mixed)))
    assert said.startswith("the host is not the bottleneck")
    assert said.endswith("waited for the host in 33% of its computing time")


def test_on_a_cpu_nothing_is_said() -> None:
    assert bottleneck(run()) == ""


@given(st.floats(0, 5), st.integers(1, 3))
def test_launches_have_a_lane_of_their_own_in_a_trace_and_load_back(behind: float, ranks: int) -> None:
    timeline = launched(run("1f1b", ranks, 3), behind)
    trace = to_chrome_trace(timeline)
    items = trace["traceEvents"]
    names = {(item["pid"], item["tid"]): item["args"]["name"] for item in items if item["name"] == "thread_name"}
    lanes = {names[item["pid"], item["tid"]] for item in items if item["ph"] == "X" and item["cat"] == "launch"}
    assert lanes == {"launch"}
    assert from_chrome_trace(json.loads(json.dumps(trace))) == timeline


def test_a_picture_has_a_lane_of_launches_only_where_there_are_some() -> None:
    timeline = run("1f1b", 2, 3)
    assert "launch" not in svg(timeline)
    drawn = svg(launched(timeline, 1), seconds=True)
    assert drawn.count(">launches</text>") == 2
    assert drawn.count("<title>launch ") == len(list(timeline.compute()))
