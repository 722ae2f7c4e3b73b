"""What a timeline says about itself: figures, reasons, comparisons, and its file."""

import json
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.waits import chain

from pipefit.cost import CostModel, unit
from pipefit.errors import PipefitError
from pipefit.ir.op import Lane, Op
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.timeline import (
    Event,
    Timeline,
    by_kind,
    compare,
    from_chrome_trace,
    load_trace,
    save_trace,
    to_chrome_trace,
    waited_for,
)
from pipefit.timeline.compare import Row, notable


def run(name="1f1b", p=4, m=8, c=0, *, repeats=1, **shape):
    program = generate(name, Shape(p, m, **shape))
    return simulate(program, unit(program.header, 1, 2, latency=c), repeats=repeats)


def shown(timeline, events):
    return [f"{e.rank}:{timeline.instruction(e)}" for e in events if e.end_s > e.start_s]


# ------------------------------------------------------------------------------------------------------------ figures


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9).map(Fraction), st.integers(1, 9).map(Fraction))
def test_the_two_bubbles_are_those_of_the_papers(p, m, f, b):
    program = generate("1f1b", Shape(p, m))
    timeline = simulate(program, unit(program.header, f, b))
    assert timeline.bubble_fraction == Fraction(p - 1, m + p - 1)
    assert timeline.bubble_over_ideal == Fraction(p - 1, m)
    assert {timeline.utilisation(rank) for rank in range(p)} == {Fraction(m, m + p - 1)}


def test_an_empty_timeline_has_figures_too():
    timeline = Timeline(generate("1f1b", Shape(2, 2)), ())
    figures = timeline.makespan_s, timeline.period_s, timeline.bubble_fraction, timeline.bubble_over_ideal
    assert figures == (0, 0, 0, 0)
    assert chain(timeline) == []
    assert timeline.peak_bytes(0) == timeline.utilisation(0) == 0


def test_a_clock_that_does_not_start_at_zero_changes_no_figure():
    here = run(m=4, repeats=3)
    there = Timeline(
        here.program, tuple(replace(e, start_s=e.start_s + 100, end_s=e.end_s + 100) for e in here.events),
        source="measured", num_repeats=3,
    )  # fmt: skip
    assert (there.makespan_s, there.period_s, there.bubble_fraction) == (
        here.makespan_s, here.period_s, here.bubble_fraction,
    )  # fmt: skip


def test_steps_end_when_their_last_update_does():
    timeline = run("1f1b", 2, 2, num_steps=3)
    assert timeline.step_ends_s == (9, 18, 27)
    assert run("1f1b", 2, 2, repeats=3).step_ends_s == (9, 18, 27)


def test_neither_fill_nor_drain_counts_in_the_period():
    # Stage 0 is the slowest: while it drains it only runs backwards, faster than its rhythm.
    program = generate("pipedream", Shape(3, 1, num_steps=12))
    timeline = simulate(program, CostModel((4, 1, 1), (2, 1, 1), (2, 1, 1)))
    ends = timeline.step_ends_s
    assert ends[-1] - ends[-2] < timeline.period_s == 8


@pytest.mark.parametrize("num_steps", [60, 75, 105])
def test_the_period_of_replicas_is_that_of_their_whole_rounds(num_steps):
    # 15 replicas end their mini-batches together: a window of other lengths has a round too many or too few.
    program = generate("pipedream", Shape(2, 1, replicas=(15, 1), num_steps=num_steps))
    timeline = simulate(program, CostModel((15, 1), (7, 0.5), (8, 0.5)))
    assert timeline.period_s == pytest.approx(2)


# ------------------------------------------------------------------------------------------------------------ reasons


def test_the_critical_path_of_gpipe_goes_down_to_the_last_rank_and_back():
    timeline = run("gpipe", 3, 2, c=5, ahead=9)
    assert shown(timeline, chain(timeline)) == [
        "0:fwd s0 m0 w0", "0:send s0 m0 act >1", "1:recv s0 m0 act <0", "1:fwd s1 m0 w0", "1:send s1 m0 act >2",
        "2:recv s1 m0 act <1", "2:fwd s2 m0 w0", "2:fwd s2 m1 w0", "2:bwd s2 m1 w0", "2:send s1 m1 grad >1",
        "1:recv s1 m1 grad <2", "1:bwd s1 m1 w0", "1:send s0 m1 grad >0", "0:recv s0 m1 grad <1", "0:bwd s0 m1 w0",
        "0:bwd s0 m0 w0",
    ]  # fmt: skip


def test_an_event_says_what_it_waited_for():
    timeline = run("gpipe", 2, 1, c=5)

    def wait(rank, op):
        event = next(e for e in timeline.events if e.rank == rank and timeline.instruction(e).op is op)
        waited = waited_for(timeline, event)
        return waited.reason, waited.by and str(timeline.instruction(waited.by)), waited.waited_s

    assert wait(0, Op.LOAD) == ("start", None, 0)
    assert wait(0, Op.FWD) == ("rank", "load s0 m0", 0)
    assert wait(1, Op.FWD) == ("message", "recv s0 m0 act <0", 6)
    assert wait(1, Op.RECV) == ("sender", "send s0 m0 act >1", 1)
    assert wait(0, Op.SEND) == ("rank", "fwd s0 m0 w0", 0)
    assert wait(0, Op.BWD) == ("message", "recv s0 m0 grad <1", 13)


def test_a_receive_that_was_posted_late_is_what_the_message_waited_for():
    timeline = run("1f1b", 2, 4, ahead=0)
    late = [e for e in timeline.events if waited_for(timeline, e).reason == "receiver"]
    assert late
    assert {timeline.instruction(e).op for e in late} == {Op.SEND}


def test_a_step_waits_for_the_reduction_of_its_gradients():
    program = generate("data-parallel", Shape(2, 2))
    timeline = simulate(program, CostModel((1,), (1,), (1,), weight_bytes=(8,), bandwidth_bytes_per_s=1))
    step = next(e for e in timeline.events if timeline.instruction(e).op is Op.STEP)
    assert waited_for(timeline, step).reason == "reduction"
    assert waited_for(timeline, step).waited_s == 8


# -------------------------------------------------------------------------------------------------------- comparisons


def test_times_by_kind_count_every_event():
    timeline = run("1f1b", 2, 4, repeats=2)
    kinds = by_kind(timeline)
    assert kinds["fwd", 0] == (8, 8, 1)
    assert kinds["bwd", 1] == (8, 16, 2)
    assert sum(kind.num_times for kind in kinds.values()) == len(timeline.events)


def test_a_measurement_twice_as_slow_is_an_error_of_one():
    predicted = run("1f1b", 2, 4, c=1)
    twice = [replace(e, start_s=2 * e.start_s, end_s=2 * e.end_s) for e in predicted.events]
    rows = compare(predicted, Timeline(predicted.program, tuple(twice), source="measured"))
    by_name = {row.name: row for row in rows}
    assert [row.name for row in rows[:3]] == ["makespan", "period", "bubble"]
    assert by_name["makespan"].error == by_name["fwd s0"].error == by_name["send s0"].error == 1
    assert by_name["bubble"].error == 0
    assert by_name["fwd s0"][1:] == (1, 2, 1, 4)
    assert by_name["step s0"].error == 0
    assert all(row.error == 0 for row in compare(predicted, predicted))


# -------------------------------------------------------------------------------------------------------------- files


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "pipedream-2bw", "data-parallel"]),
    st.integers(1, 3),
    st.integers(3, 5),
    st.floats(0, 3),
    st.integers(1, 2),
)
def test_a_trace_loads_back_as_the_same_timeline(name, p, m, c, repeats):
    timeline = run(name, p, m, c, repeats=repeats)
    again = from_chrome_trace(json.loads(json.dumps(to_chrome_trace(timeline))))
    assert again == timeline


def test_a_saved_trace_loads_back(tmp_path):
    timeline = run(m=4)
    assert load_trace(save_trace(timeline, tmp_path / "run.trace.json")) == timeline


def test_slices_of_one_thread_never_cross():
    trace = to_chrome_trace(run("1f1b", 4, 8, c=3, ahead=3))
    threads = {}
    for item in trace["traceEvents"]:
        if item["ph"] == "X":
            threads.setdefault((item["pid"], item["tid"]), []).append((item["ts"], item["ts"] + item["dur"]))
    assert len(threads) > 8  # messages in flight together need further threads
    for slices in threads.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(slices))


def test_every_message_is_an_arrow_between_two_slices():
    timeline = run("1f1b", 3, 4, c=1)
    items = to_chrome_trace(timeline)["traceEvents"]
    slices = [item for item in items if item["ph"] == "X"]
    num_messages = sum(item["cat"] == "send" for item in slices)
    for phase, op in (("s", "send"), ("f", "recv")):
        ends = [item for item in items if item["ph"] == phase]
        assert len(ends) == num_messages == 16
        for end in ends:
            around = [
                item["cat"] for item in slices
                if (item["pid"], item["tid"]) == (end["pid"], end["tid"])
                and item["ts"] <= end["ts"] <= item["ts"] + item["dur"]
            ]  # fmt: skip
            assert op in around


def test_ranks_are_processes_lanes_are_threads_and_memory_is_a_counter():
    timeline = run("1f1b", 2, 2)
    items = to_chrome_trace(timeline)["traceEvents"]
    names = {(i["pid"], i["tid"]): i["args"]["name"] for i in items if i["name"] == "thread_name"}
    assert names[0, 0] == Lane.COMPUTE.value
    assert names[0, 100] == Lane.COMM.value
    assert [i["args"]["name"] for i in items if i["name"] == "process_name"] == ["rank 0 (s0)", "rank 1 (s1)"]
    counters = [i["args"]["bytes"] for i in items if i["ph"] == "C" and i["pid"] == 0]
    assert max(counters) == timeline.peak_bytes(0) == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda trace: trace.update(format="other"), "expected a trace"),
        (lambda trace: trace.pop("otherData"), "malformed trace: KeyError"),
        (lambda trace: trace["traceEvents"][-1].pop("ph"), "malformed trace"),
        (lambda trace: trace["otherData"].update(program="nonsense"), "program:1: expected"),
    ],
)
def test_a_spoilt_trace_is_refused(spoil, message):
    trace = to_chrome_trace(run(m=2))
    spoil(trace)
    with pytest.raises(PipefitError, match=message):
        from_chrome_trace(trace, "run.json")


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(PipefitError, match="no such file"):
        load_trace(tmp_path / "none.json")
    with pytest.raises(PipefitError, match="got 'list'"):
        from_chrome_trace([])
    timeline = run(m=2)
    lost = Timeline(timeline.program, (Event(0, 999, 0, 0.0, 1.0),))
    with pytest.raises(IndexError):
        to_chrome_trace(lost)


def test_rows_below_a_percent_of_the_period_are_noise():
    rows = [
        Row("period", 1.0, 2.0, 1.0, 1),
        Row("bubble", 0.001, 0.3, 0.299, 1),
        Row("fwd s0", 0.5, 1.0, 1.0, 1),
        Row("loss", 1e-6, 4e-4, 399.0, 1),
        Row("loss", 1e-6, 1.0, 1e6, 1),
    ]
    assert notable(rows) == rows[:3]
