"""Simulated times equal the closed forms wherever those hold; rounds of exact numbers, so equality is equality."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cost import CostModel, unit
from pipefit.errors import InvalidProgramError, PlanError
from pipefit.ir.liveness import peak_inflight
from pipefit.ir.op import Op
from pipefit.ir.text import parse
from pipefit.schedules import Shape, generate
from pipefit.simulate import metrics, simulate, steady_period_s
from pipefit.timeline import waited_for

times = st.integers(1, 9).map(Fraction)
latencies = st.integers(0, 5).map(Fraction)
depths = st.integers(1, 6)
counts = st.integers(1, 14)


def run(name, p, m, f, b, c=0, *, v=1, repeats=1, rendezvous=False, **shape):
    program = generate(name, Shape(p, m, num_chunks=v, **shape))
    cost = unit(program.header, f, b, latency=c)
    return simulate(program, cost, repeats=repeats, rendezvous=rendezvous)


# ------------------------------------------------------------------------------------------------------- closed forms


@given(depths, counts, times, times, latencies)
def test_naive_takes_m_times_the_way_there_and_back(p, m, f, b, c):
    assert run("naive", p, m, f, b, c).makespan_s == m * (p * (f + b) + 2 * (p - 1) * c)


@given(depths, counts, times, times, latencies)
def test_gpipe_takes_m_plus_p_minus_one_rounds_and_each_latency_once_each_way(p, m, f, b, c):
    assert run("gpipe", p, m, f, b, c).makespan_s == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@given(st.integers(2, 6), st.integers(1, 5), times, times, latencies)
def test_1f1b_pays_the_latency_again_in_every_round_of_p_microbatches(p, rounds, f, b, c):
    m = p * rounds
    latency = 2 * c * ((p - 1) * rounds + p - 2)
    assert run("1f1b", p, m, f, b, c).makespan_s == (m + p - 1) * (f + b) + latency


@given(depths, counts, times, times)
def test_1f1b_without_latency_takes_as_long_as_gpipe_for_any_count(p, m, f, b):
    assert run("1f1b", p, m, f, b).makespan_s == (m + p - 1) * (f + b)


@given(depths, counts, times, times, st.data())
def test_1f1b_with_twice_the_warmup_hides_latency_up_to_half_a_round(p, m, f, b, data):
    c = data.draw(st.integers(0, int(f + b)).map(lambda twice: Fraction(twice, 2)))
    timeline = run("1f1b", p, m, f, b, c, options={"warmup": 2})
    assert timeline.makespan_s == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 4), times, times, st.data())
def test_interleaved_divides_the_bubble_by_v_and_pays_2pv_minus_2_latencies(p, rounds, v, f, b, data):
    m = p * rounds
    c = data.draw(st.integers(0, int(min(f, b)))) / Fraction(v)
    expected = (m + Fraction(p - 1, v)) * (f + b) + 2 * (p * v - 1) * c
    assert run("interleaved", p, m, f, b, c, v=v).makespan_s == expected


@given(st.integers(1, 5), st.integers(0, 8), st.integers(1, 4), times, times)
def test_breadth_first_divides_the_bubble_by_v_from_p_microbatches_on(p, more, v, f, b):
    m = p + more
    assert run("breadth-first", p, m, f, b, v=v).makespan_s == (m + Fraction(p - 1, v)) * (f + b)


def halved(name, p, m, f, i, w, *, v=1, repeats=1):
    program = generate(name, Shape(p, m, num_chunks=v))
    cost = unit(program.header, f, input=i, weight=w)
    return simulate(program, cost, repeats=repeats, rendezvous=False)


@given(depths, st.integers(0, 9), times, times, times)
def test_zb_h1_leaves_of_the_bubble_what_weight_gradients_cannot_fill(p, more, f, i, w):
    m = p + more
    bubble = (p - 1) * max(f, i, f + i - w)
    assert halved("zb-h1", p, m, f, i, w).makespan_s == m * (f + i + w) + bubble


@given(st.integers(1, 4), st.integers(0, 5), times, times, times)
def test_zb_h2_goes_from_update_to_update_without_a_bubble_where_the_halves_are_even(p, more, f, i, w):
    m = 2 * p - 1 + more
    bubble = (p - 1) * max(0, f + i - 2 * w, i - f)
    assert halved("zb-h2", p, m, f, i, w, repeats=4).period_s == m * (f + i + w) + bubble


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(0, 9), times)
def test_zb_v_waits_only_for_the_first_microbatch_to_come_down(p, more, f):
    m = 2 * p - 1 + more
    assert halved("zb-v", p, m, f, f, f, v=2).makespan_s == 3 * m * f + (p - 1) * f / 2


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 5), times)
def test_zb_v_goes_from_update_to_update_without_a_bubble_on_few_ranks(p, more, f):
    m = 2 * p - 1 + more
    chunk = f / 2 if p > 4 else 0
    assert halved("zb-v", p, m, f, f, f, v=2, repeats=4).period_s == 3 * m * f + chunk


@given(st.integers(1, 5), st.integers(1, 4), times, times)
def test_data_parallel_has_no_bubble_when_the_ranks_share_evenly(p, each, f, b):
    timeline = run("data-parallel", p, p * each, f, b)
    assert timeline.makespan_s == p * each * (f + b)
    assert timeline.bubble_fraction == 0


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "interleaved", "breadth-first"]),
    st.integers(1, 4),
    st.integers(1, 3),
    times,
    times,
    latencies,
)
def test_a_flush_makes_the_period_as_long_as_the_step(name, p, rounds, f, b, c):
    # Rank 0 both starts and ends every step, so without a barrier nothing of the next step can move ahead.
    v = 2 if name in ("interleaved", "breadth-first") else 1
    once = run(name, p, p * rounds, f, b, c, v=v)
    assert run(name, p, p * rounds, f, b, c, v=v, repeats=4).period_s == once.makespan_s


@given(
    st.sampled_from(["pipedream", "pipedream-vertical-sync", "pipedream-2bw"]),
    st.integers(1, 5),
    st.integers(0, 3),
    times,
    times,
)
def test_asynchronous_schedules_have_no_bubble_in_the_steady_state(name, p, more, f, b):
    m = max(p - 1, 1) + more
    timeline = run(name, p, m, f, b, num_steps=p + 4)
    assert timeline.is_steady
    assert timeline.period_s == m * (f + b)
    assert timeline.makespan_s == (m * (p + 4) + p - 1) * (f + b)


def test_the_period_of_an_asynchronous_schedule_is_that_of_its_slowest_stage():
    program = generate("pipedream", Shape(3, 1, num_steps=20))
    cost = CostModel((1, 5, 2), (1, 5, 2), (1, 5, 2))
    assert simulate(program, cost).period_s == 15


def test_period_of_unequal_replicas_is_per_step_and_not_per_update():
    # Stage 0 runs on two ranks and steps every second mini-batch; all the same one mini-batch takes f + b.
    program = generate("pipedream", Shape(2, 1, num_steps=24, replicas=(2, 1)))
    cost = CostModel((2, 1), (2, 1), (2, 1))
    assert simulate(program, cost).period_s == 3


# -------------------------------------------------------------------------------------------------------------- peaks


@given(st.integers(1, 5), counts, times, times)
def test_simulated_memory_peaks_where_liveness_says(p, m, f, b):
    for name in ("gpipe", "1f1b", "naive"):
        timeline = run(name, p, m, f, b)
        peaks = [timeline.peak_bytes(rank) for rank in range(p)]
        assert peaks == [peak_inflight(timeline.program, rank) for rank in range(p)]
        assert all(samples[-1][1] == 0 for samples in timeline.memory)


@pytest.mark.slow
@given(st.integers(1, 5), counts)
def test_1f1b_holds_p_minus_r_microbatches_and_gpipe_all(p, m):
    assert [run("1f1b", p, m, 1, 2).peak_bytes(r) for r in range(p)] == [min(p - r, m) for r in range(p)]
    assert [run("gpipe", p, m, 1, 2).peak_bytes(r) for r in range(p)] == [m] * p
    doubled = run("1f1b", p, m, 1, 2, options={"warmup": 2})
    assert [doubled.peak_bytes(r) for r in range(p)] == [min(2 * (p - r) - 1, m) for r in range(p)]


def test_interleaved_holds_its_warmup():
    p, v, m = 4, 2, 16
    timeline = run("interleaved", p, m, 1, 2, v=v)
    assert [timeline.peak_bytes(r) for r in range(p)] == [((v - 1) * p + 2 * (p - 1 - r) + 1) / v for r in range(p)]


def test_what_travels_and_what_stays_is_counted():
    program = generate("1f1b", Shape(2, 1))
    cost = CostModel(
        (1, 1), (1, 1), (1, 1), act_bytes=(10, 3), saved_bytes=(100, 100), weight_bytes=(1000, 2000),
        optim_bytes=(5000, 0), input_bytes=7, latency_s=4,
    )  # fmt: skip
    rank0, rank1 = simulate(program, cost).memory
    # Input, activation and what is saved; the activation leaves when it has arrived; its gradient's buffer is there.
    assert rank0[0] == (0, 5000 + 1000 + 7 + 10 + 100 + 10)
    assert dict(rank0)[5] == 6000 + 100 + 10
    assert dict(rank0)[12] == 6000 + 100 + 10 + 1000
    assert rank0[-1] == (14, 6000)
    # The buffer of the activation is there from posting on.
    assert rank1[0] == (0, 2000 + 10)
    assert rank1[-1][1] == 2000


def test_memory_of_repeated_passes_is_that_of_one_pass_again_and_again():
    program = generate("1f1b", Shape(3, 4))
    cost = CostModel((1,) * 3, (1,) * 3, (1,) * 3, act_bytes=(1, 1, 1), saved_bytes=(9, 9, 9), weight_bytes=(50,) * 3)
    one, three = simulate(program, cost), simulate(program, cost, repeats=3)
    for rank in range(3):
        assert three.peak_bytes(rank) == one.peak_bytes(rank)
        assert three.memory[rank][-1][1] == one.memory[rank][-1][1] == 50


# ---------------------------------------------------------------------------------------------- when messages travel


@given(st.sampled_from(["gpipe", "1f1b", "pipedream"]), st.integers(1, 4), counts, times, times, latencies)
def test_without_rendezvous_posting_receives_earlier_changes_nothing(name, p, m, f, b, c):
    spans = {run(name, p, m, f, b, c, ahead=ahead).makespan_s for ahead in (0, 1, 3)}
    assert len(spans) == 1


@given(st.sampled_from(["gpipe", "1f1b", "pipedream"]), st.integers(1, 4), counts, times, times, st.integers(1, 3))
def test_receives_far_enough_ahead_make_a_rendezvous_cost_nothing(name, p, m, f, b, ahead):
    c = ahead * min(f, b)
    late = run(name, p, m, f, b, c, ahead=ahead, rendezvous=True).makespan_s
    assert late == run(name, p, m, f, b, c).makespan_s


def test_a_receive_posted_just_before_its_use_delays_a_rendezvous_by_the_latency():
    assert run("gpipe", 2, 4, 1, 1, 1, ahead=0, rendezvous=True).makespan_s > run("gpipe", 2, 4, 1, 1, 1).makespan_s


def two_ranks(first, second):
    header = (
        "format pipefit.program/1\nschedule hand\nmicrobatches 3\nsteps 1\nweights flush\nplacement 0 1\nupdates 3 3\n"
    )
    return parse(f"{header}\nrank 0\n{first}\n\nrank 1\n{second}\n")


FORWARDS = "\n".join(f"load s0 m{m}\nfwd s0 m{m} w0\nsend s0 m{m} act >1" for m in range(3))
RECEIVES = "\n".join(f"recv s0 m{m} act <0" for m in range(3))


def ends(timeline, rank, op):
    return [e.end_s for e in timeline.events if e.rank == rank and timeline.instruction(e).op is op]


def test_a_message_starts_when_both_sides_have_posted_it():
    program = two_ranks(FORWARDS, RECEIVES)
    cost = CostModel((1, 1), (1, 1), (1, 1), act_bytes=(10, 0), bandwidth_bytes_per_s=5, latency_s=3)
    assert ends(simulate(program, cost), 1, Op.RECV) == [6, 7, 8]


def test_contention_lets_one_message_through_a_link_at_a_time():
    program = two_ranks(FORWARDS, RECEIVES)
    cost = CostModel((1, 1), (1, 1), (1, 1), act_bytes=(10, 0), bandwidth_bytes_per_s=5, latency_s=3)
    timeline = simulate(program, cost, contention=True)
    assert ends(timeline, 1, Op.RECV) == [6, 11, 16]
    assert [waited_for(timeline, e).reason for e in timeline.events if e.rank == 1] == ["sender", "link", "link"]


def test_issuing_a_message_takes_the_ranks_time():
    program = two_ranks(FORWARDS, RECEIVES)
    cost = CostModel((1, 1), (1, 1), (1, 1), act_bytes=(10, 0), post_s=2, copy_s_per_byte=1, latency_s=3)
    timeline = simulate(program, cost)
    assert ends(timeline, 0, Op.FWD) == [1, 14, 27]
    assert ends(timeline, 1, Op.RECV) == [16, 29, 42]


def test_a_slow_rank_takes_longer_over_the_same_work():
    program = two_ranks(FORWARDS, RECEIVES)
    cost = CostModel((1, 1), (1, 1), (1, 1), speed=(Fraction(1, 2), 1), overhead_s=1)
    assert ends(simulate(program, cost), 0, Op.FWD) == [4, 8, 12]


# -------------------------------------------------------------------------------------------------------- reductions


def test_a_reduction_starts_with_its_last_member_and_the_step_waits_for_it():
    program = generate("data-parallel", Shape(2, 3))
    cost = CostModel((1,), (1,), (1,), weight_bytes=(12,), bandwidth_bytes_per_s=4, step_s=(5,), latency_s=7)
    timeline = simulate(program, cost)
    # Two micro-batches on rank 0 take 6 s; 2·(1/2)·12/4 = 3 s of transfer and two rounds of latency.
    assert set(ends(timeline, 0, Op.REDUCE) + ends(timeline, 1, Op.REDUCE)) == {6 + 3 + 14}
    assert timeline.makespan_s == 6 + 17 + 5


def test_clipping_waits_for_the_norm_of_all_reduced_gradients():
    program = generate("1f1b", Shape(2, 4, replicas=(2, 2), clip=True))
    cost = CostModel((1, 1), (1, 1), (1, 1), weight_bytes=(8, 80), bandwidth_bytes_per_s=1, latency_s=1)
    timeline = simulate(program, cost)
    norms = {e.end_s for e in timeline.events if timeline.instruction(e).kind == "norm"}
    sums = [e.end_s for e in timeline.events if timeline.instruction(e).kind == "replicas"]
    assert norms == {max(sums) + 4}
    assert timeline.makespan_s == max(norms)


# -------------------------------------------------------------------------------------------------- bad programs, costs


def without(program, rank, index):
    ranks = [list(instructions) for instructions in program.ranks]
    del ranks[rank][index]
    return program.with_ranks(ranks)


@pytest.mark.parametrize(("op", "message"), [(Op.SEND, "no matching send"), (Op.RECV, "which nothing before it makes")])
def test_a_message_with_one_side_is_refused(op, message):
    program = generate("1f1b", Shape(2, 2))
    rank, index = next((rank, index) for rank, index, i in program if i.op is op)
    with pytest.raises(InvalidProgramError, match=message):
        simulate(without(program, rank, index), unit(program.header))


def test_a_collective_that_a_rank_never_joins_is_refused():
    program = generate("data-parallel", Shape(2, 2))
    index = next(index for rank, index, i in program if rank == 1 and i.op is Op.REDUCE)
    with pytest.raises(InvalidProgramError, match=r"ranks \[1\] never join"):
        simulate(without(program, 1, index), unit(program.header))


def test_a_hang_names_what_waits_for_what():
    # Each rank first wants what the other sends only afterwards.
    program = two_ranks(
        "load s0 m0\nfwd s0 m0 w0\nrecv s0 m0 grad <1\nbwd s0 m0 w0\nsend s0 m0 act >1",
        "recv s0 m0 act <0\nload s1 m0\nfwd s1 m0 w0\nloss m0\nbwd s1 m0 w0\nsend s0 m0 grad >0",
    )
    with pytest.raises(InvalidProgramError) as caught:
        simulate(program, unit(program.header))
    assert str(caught.value).splitlines() == [
        "the program hangs:",
        "  rank 0 is at instruction 3 (bwd s0 m0 w0) and waits for recv s0 m0 grad <1, "
        "which rank 1 has not reached (its instruction 5: send s0 m0 grad >0)",
        "  rank 1 is at instruction 2 (fwd s1 m0 w0) and waits for recv s0 m0 act <0, "
        "which rank 0 has not reached (its instruction 4: send s0 m0 act >1)",
    ]


def test_costs_of_another_partition_are_refused():
    program = generate("1f1b", Shape(2, 2))
    with pytest.raises(PlanError, match="3 stages"):
        simulate(program, CostModel((1,) * 3, (1,) * 3, (1,) * 3))
    with pytest.raises(PlanError, match="repeats"):
        simulate(program, unit(program.header), repeats=0)
    with pytest.raises(PlanError, match="rendezvous"):
        simulate(program, unit(program.header), contention=True, rendezvous=False)


# ------------------------------------------------------------------------------------------------------------ metrics


def test_metrics_answer_what_draw_promises():
    program = generate("interleaved", Shape(2, 4, num_chunks=2))
    cost = unit(program.header, 1, 2)
    answer = metrics(program, simulate(program, cost))
    assert answer == {
        "schedule": "interleaved",
        "num_stages": 4,
        "num_ranks": 2,
        "num_microbatches": 4,
        "num_chunks": 2,
        "makespan": 13.5,
        "period": 13.5,
        "bubble_fraction": pytest.approx(1.5 / 13.5),
        "bubble_over_ideal": pytest.approx(1.5 / 12),
        "peak_inflight": [2.5, 1.5],
        "kept_inputs": [0, 0],
        "weight_versions": [1, 1],
        "messages": 24,
        "order": [list(order) for order in program.order],
    }


def test_an_asynchronous_program_too_short_for_a_rhythm_gets_the_load_of_its_busiest_rank():
    short = generate("pipedream-2bw", Shape(4, 4))
    assert steady_period_s(short, unit(short.header, 1, 2)) == 12
    longer = generate("pipedream-2bw", Shape(4, 4, num_steps=8))
    assert metrics(short, simulate(short, unit(short.header)), steady=longer)["period"] == 12


def test_the_period_is_simulated_the_way_the_timeline_was():
    # With its receives posted too late for a rendezvous, a step takes longer, and so does its rhythm.
    program = generate("gpipe", Shape(3, 4, ahead=0))
    cost = unit(program.header, 1, 2, latency=1)
    for rendezvous in (True, False):
        timeline = simulate(program, cost, rendezvous=rendezvous)
        answer = metrics(program, timeline, cost)
        assert answer["period"] == answer["makespan"] == timeline.makespan_s
    assert timeline.makespan_s == (4 + 3 - 1) * 3 + 2 * 2


@pytest.mark.parametrize("latency", [0, 0.5, 3])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 3), ("breadth-first", 2)],
)
def test_the_second_pass_of_a_step_takes_as_long_as_all_later_ones(schedule, chunks, latency):
    program = generate(schedule, Shape(3, 6, chunks))
    stages = range(3 * chunks)
    uneven = {
        "forward_s": tuple(1 + stage % 3 for stage in stages),
        "step_s": tuple(5 * (stage % 2) for stage in stages),
    }
    cost = replace(unit(program.header, 1, 2, latency=latency), **uneven)
    for contention in (False, True):
        later = simulate(program, cost, repeats=8, contention=contention).step_ends_s
        assert later[7] - later[6] == pytest.approx(steady_period_s(program, cost, contention=contention))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "pipedream", "pipedream-2bw", "spilled"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_events_of_steps_alone_give_the_same_times(name, repeats):
    shape = Shape(3, 4, num_chunks=2 if name in ("interleaved", "spilled") else 1, num_steps=3)
    program = generate(name, shape)
    whole, steps = (
        simulate(program, unit(program.header, 1, 2), repeats=repeats, steps_only=only) for only in (False, True)
    )
    for figure in ("start_s", "makespan_s", "step_ends_s", "is_steady", "period_s"):
        assert getattr(steps, figure) == getattr(whole, figure), figure
    assert set(steps.events) <= set(whole.events) and not steps.memory
