"""Schedules found by search: optimal where theory or brute force says what that is, proved, and within their limits."""

import json
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from pipefit.cli import main
from pipefit.cost import CostModel, unit
from pipefit.errors import InfeasibleError, PipefitError, ScheduleError
from pipefit.ir import text
from pipefit.ir.liveness import device_peak_bytes, peak_inflight
from pipefit.passes.build import build
from pipefit.schedules import Shape, find, generate
from pipefit.simulate import simulate
from pipefit.synthesize import header_of, synthesize
from pipefit.synthesize.bound import bound_s
from pipefit.synthesize.greedy import listed, policies
from pipefit.synthesize.order_problem import FORWARD, INPUT, WEIGHT, Limit, OrderProblem
from pipefit.synthesize.order_times import timed
from pipefit.verify import verify

QUICK = {"candidates": 400, "seconds": 60.0}


def random_case(random, num_chunks=1):
    """A shape, costs that differ from stage to stage, and room for a few micro-batches."""
    num_ranks, layout = random.randint(2, 4), random.choice(("loop", "wave"))
    header = header_of(num_ranks, random.randint(2, 6), num_chunks, layout)

    def figures():
        return tuple(random.choice((1, 1.5, 2, 3.25)) for _ in range(header.num_stages))

    cost = CostModel(figures(), figures(), figures(), latency_s=random.choice((0, 0.25, 1)))
    return header, cost, random.randint(1, num_ranks)


def problem_of(header, cost, in_flight, split=True):
    return OrderProblem.of(header, cost, Limit((float(in_flight),) * header.num_ranks), [0] * header.num_ranks, split)


@pytest.mark.parametrize(
    ("header", "times", "options", "makespan"),
    [
        (header_of(4, 8), (1, 1, 1), {"in_flight": 4}, 8 * 3 + 3),  # zb-h1: m(f+i+w) + (p−1)·max(f, i, f+i−w)
        (header_of(4, 8), (2, 3, 3), {"in_flight": 4}, 8 * 8 + 3 * 3),
        (header_of(4, 8), (1, 1, 1), {"in_flight": (4, 3, 2, 1), "split": False}, (8 + 3) * 3),  # 1f1b
        (header_of(4, 8, 2), (2, 2, 2), {"split": False}, (8 + 1.5) * 6),  # interleaved: (m+(p−1)/v)(f+b)
        (header_of(3, 6, 2, "wave"), (2, 2, 2), {"in_flight": 3}, 3 * 6 * 2 + 2 * 2 / 2),  # zb-v: 3mf + (p−1)f/2
    ],
)
def test_even_stages_reach_the_optimum_of_the_papers_and_the_bound_says_so(header, times, options, makespan):
    forward, input, weight = times
    found = synthesize(header, unit(header, forward, input=input, weight=weight), **options, **QUICK)
    assert (found.makespan_s, found.bound_s, found.gap) == (makespan, makespan, 0)


def rank_orders(num_microbatches):
    """Every order of one stage's steps that its micro-batches allow."""
    found = [((), (0, 0, 0))]
    for _ in range(3 * num_microbatches):
        found = [
            ((*order, kind), tuple(n + (k == kind) for k, n in enumerate(done)))
            for order, done in found
            for kind in (FORWARD, INPUT, WEIGHT)
            if done[kind] < (num_microbatches if kind == FORWARD else done[kind - 1])
        ]
    return [order for order, _ in found]


def test_on_two_ranks_the_search_finds_what_brute_force_finds_and_the_bound_is_below_it():
    orders, random = rank_orders(3), Random(0)
    for _ in range(2):
        header = header_of(2, 3)
        times = [tuple(random.randint(1, 5) for _ in range(2)) for _ in range(3)]
        cost, limit = CostModel(*times, latency_s=random.randint(0, 2)), random.choice((2, 3))
        problem = problem_of(header, cost, limit)
        all_of = [[[2 * kind + rank for kind in order] for order in orders] for rank in range(2)]
        kept = [[steps for steps in all_of[rank] if problem.keeps(rank, steps)] for rank in range(2)]
        least = min(t.makespan_s for pair in product(*kept) if (t := timed(problem, list(pair))))
        found = synthesize(header, cost, in_flight=limit, **QUICK)
        assert found.bound_s <= least == found.makespan_s


def test_on_random_stages_no_built_in_that_fits_is_faster_the_limit_is_kept_and_the_verifier_agrees():
    random = Random(3)
    for num_chunks in (1, 1, 1, 2, 2):
        header, cost, limit = random_case(random, num_chunks)
        found = synthesize(header, cost, in_flight=limit, candidates=150, seconds=60)
        assert all(found.makespan_s <= took for took in found.built_in.values())
        assert found.bound_s <= found.makespan_s * (1 + 1e-9)
        assert max(peak_inflight(found.program, rank) for rank in range(header.num_ranks)) <= limit
        assert verify(found.program).ok
        assert simulate(found.program, cost, rendezvous=False).makespan_s == found.makespan_s


def test_the_clock_of_the_search_is_that_of_the_simulator():
    random = Random(5)
    for num_chunks in (1, 2):
        header, cost, limit = random_case(random, num_chunks)
        cost = replace(cost, step_s=cost.forward_s, loss_s=0.5, load_s=0.25)
        for split in (True, False):
            problem = problem_of(header, cost, limit, split)
            order = next(found for policy in policies(problem) if (found := listed(problem, policy)))
            program = build(header, problem.instructions(order))
            assert timed(problem, order).makespan_s == pytest.approx(
                simulate(program, cost, rendezvous=False).makespan_s, rel=1e-12
            )
            assert all(problem.keeps(rank, steps) for rank, steps in enumerate(order))
            assert bound_s(problem) <= timed(problem, order).makespan_s * (1 + 1e-9)


def test_the_clock_counts_the_loading_of_a_batch_where_one_rank_has_the_only_stage():
    header = header_of(num_ranks=1, num_microbatches=3)
    cost = replace(unit(header), loss_s=0.5, load_s=0.25)
    problem = problem_of(header, cost, 1, split=False)
    order = listed(problem, next(policies(problem)))
    program = build(header, problem.instructions(order))
    assert timed(problem, order).makespan_s == simulate(program, cost, rendezvous=False).makespan_s


def test_backwards_stay_whole_where_halves_take_more_and_the_bound_knows():
    cost = CostModel((1, 1), (1, 1), (1, 1), split_s=(0.5, 0.5))
    found = synthesize(header_of(2, 4), cost, in_flight=(2, 1), **QUICK)
    assert found.bound_s <= found.makespan_s <= found.built_in["1f1b"]
    assert sum(op[0] == "B" for op in found.program.order[0]) >= 2


def test_a_slow_stage_and_latency_leave_every_built_in_behind():
    header = header_of(4, 16)
    times = (1, 2, 1, 1)
    cost = CostModel(times, times, times, latency_s=0.5)
    found = synthesize(header, cost, in_flight=4, **QUICK)
    assert (found.makespan_s, found.bound_s) == (97.5, 97.5)
    assert min(found.built_in.values()) == found.built_in["zb-h1"] == 99.5


def test_the_same_seed_finds_the_same_and_more_candidates_nothing_slower():
    header = header_of(3, 5)
    cost = CostModel((1, 1.5, 1), (2, 1, 1), (1, 1, 3), latency_s=0.5)
    few, again, many = (
        synthesize(header, cost, in_flight=2, candidates=count, seconds=60, seed=1) for count in (150, 150, 600)
    )
    assert few.program == again.program
    assert many.makespan_s <= few.makespan_s


def test_shapes_that_no_built_in_schedule_has_get_one_even_with_room_for_one_microbatch():
    found = synthesize(header_of(2, 3, 3, "wave"), in_flight=1, **QUICK)
    assert found.built_in == {} and found.best_built_in is None
    assert max(peak_inflight(found.program, rank) for rank in range(2)) <= 1
    assert found.makespan_s < 3 * 3 * 2  # every micro-batch alone


def test_where_backwards_stay_whole_only_such_schedules_stand_beside():
    found = synthesize(header_of(3, 4), split=False, **QUICK)
    assert not any(op[0] in "IW" for order in found.program.order for op in order)
    assert not any(name.startswith("zb") for name in found.built_in)


def test_less_memory_never_makes_it_faster():
    header = header_of(3, 6)
    took = [synthesize(header, in_flight=limit, **QUICK).makespan_s for limit in (3, 2, 1)]
    assert all(more <= less for more, less in pairwise(took))


def test_bytes_are_kept_by_the_liveness_of_all_values():
    header = header_of(3, 6)
    sizes = {"saved_bytes": (6, 4, 5), "half_bytes": (2, 1, 1), "act_bytes": (1, 1, 1), "weight_bytes": (3, 3, 3)}
    cost = CostModel((1, 1, 1), (1, 1, 1), (1, 1, 1), **sizes)
    generous = synthesize(header, cost, **QUICK)
    peak = max(device_peak_bytes(generous.program, rank, cost.size_bytes)[0] for rank in range(3))
    found = synthesize(header, cost, capacity_bytes=0.7 * peak, **QUICK)
    assert max(device_peak_bytes(found.program, rank, cost.size_bytes)[0] for rank in range(3)) <= 0.7 * peak
    assert found.makespan_s < min(found.built_in.values())
    with pytest.raises(InfeasibleError, match="at least one micro-batch"):
        synthesize(header, cost, capacity_bytes=5, **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": 0}, "in_flight: expected one figure of at least 1"),
        ({"in_flight": (2, 2, 2)}, "one for each of 2 ranks"),
        ({"candidates": 0}, "at least one candidate"),
        ({"seconds": 0}, "more than 0 seconds"),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(PipefitError, match=message):
        synthesize(header_of(2, 4), **options)


def test_stages_need_one_rank_each():
    with pytest.raises(ScheduleError, match="loop or wave"):
        header_of(2, 4, layout="spiral")
    with pytest.raises(ScheduleError, match="one rank per stage"):
        synthesize(generate("1f1b", Shape(2, 4, replicas=(2, 1))).header, CostModel((1, 1), (1, 1), (1, 1)))


def test_a_pipe_file_is_a_schedule_for_its_shape_for_copies_of_it_and_for_several_updates(tmp_path):
    found = synthesize(header_of(2, 3, 2, "wave"), in_flight=1.5, **QUICK)
    path = str(text.save(found.program, tmp_path / "found.pipe"))
    assert find(path) is find(path)
    again = generate(path, Shape(2, 3, 2))
    assert (again.order, again.header.placement) == (found.program.order, found.program.header.placement)
    assert verify(generate(path, Shape(2, 3, 2, frozen=2, clip=True))).ok
    copies = generate(path, Shape(2, 6, 2, num_steps=2, replicas=(2,)))
    assert verify(copies).ok
    assert len(copies.order[0]) == 2 * len(again.order[0])
    assert [op[:3] for op in copies.order[3][: len(again.order[1])]] == [op[:3] for op in again.order[1]]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(2, 4, 2), "is for 2 ranks, 3 micro-batches, 2 chunks, got 2 ranks, 4 micro-batches, 2 chunks"),
        (Shape(4, 3), "got 4 ranks, 3 micro-batches"),
        (Shape(2, 3, 2, replicas=(2,)), "6 micro-batches, 2 chunks for 2 copies of the pipeline"),
    ],
)
def test_a_pipe_file_refuses_other_shapes_and_says_its_own(tmp_path, shape, message):
    path = text.save(generate("interleaved", Shape(2, 3, 2)), tmp_path / "mine.pipe")
    with pytest.raises(ScheduleError, match=message):
        generate(str(path), shape)


def test_a_pipe_file_that_is_no_schedule_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="No such file"):
        find(str(tmp_path / "none.pipe"))
    two = text.save(generate("1f1b", Shape(2, 3, num_steps=2)), tmp_path / "two.pipe")
    with pytest.raises(ScheduleError, match="expected one update of a schedule with a flush, got 2"):
        find(str(two))
    frozen = text.save(generate("1f1b", Shape(3, 3, frozen=2)), tmp_path / "frozen.pipe")
    with pytest.raises(ScheduleError, match="expected the backwards of all stages, got 2 frozen stages"):
        find(str(frozen))
    replicated = text.save(generate("1f1b", Shape(2, 4, replicas=(2, 1))), tmp_path / "replicated.pipe")
    with pytest.raises(ScheduleError, match="one rank per stage"):
        find(str(replicated))


def test_the_verb_says_makespan_bound_and_what_built_in_schedules_take(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["synthesize", "-p", "4", "-m", "12", "--memory", "4", "--stage-work", "1,2,1,1", "--latency", "0.5"]
    assert main([*words, "-o", "found.pipe"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "no schedule takes less than 73.5: none is faster",
        "best of the built-in: zb-h1 takes 75.5, 2.7 % more",
        "wrote found.pipe",
    ]
    assert main(["verify", "found.pipe"]) == 0
    capsys.readouterr()
    assert main(["draw", "found.pipe", "-p", "4", "-m", "12", "--input", "1", "--weight", "1", "--json"]) == 0
    order = json.loads(capsys.readouterr().out)["order"]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["order"] == order and max(data["peak_inflight"]) <= 4
    assert (data["makespan"], data["bound"], data["gap"], data["best_built_in"]) == (73.5, 73.5, 0, "zb-h1")


def test_a_capacity_is_for_the_states_of_the_optimizer_too(capsys):
    words = ["synthesize", "--profile", "gpt:layers=8,hidden=1024,heads=16", "--topology", "dgx-a100-8", "-p", "4"]
    words += ["-m", "2", "--layers", "3,2,2,3", "--candidates", "50"]
    # 78 million parameters on the first rank: 0.3 GiB of weights and gradients; six times the weights for Adam.
    assert main([*words, "--capacity", "2GiB"]) != 0
    assert "no order respects the limit" in capsys.readouterr().err
    assert main([*words, "--capacity", "3GiB"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected -p ranks and -m micro-batches"),
        (("-p", "2", "-m", "4", "--memory", "0"), "--memory: expected a number above 0"),
        (("-p", "2", "-m", "4", "--stage-work", "1,2,3"), "work of the stages: expected a figure for each of 2 stages"),
        (("-p", "2", "-m", "4", "--capacity", "1GiB"), "--capacity needs --profile"),
        (("-p", "2", "--plan", "plan.json"), "leave out -p, -m and -v"),
    ],
)
def test_the_verb_refuses_what_contradicts_itself(words, message, capsys):
    assert main(["synthesize", *words]) == 2
    assert message in capsys.readouterr().err
