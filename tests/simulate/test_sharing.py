"""Ranks that share cores: closed forms of processor sharing."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cost import CostModel, unit
from pipefit.errors import TopologyError
from pipefit.ir.op import Op
from pipefit.planner.space import grouped
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.simulate.event_engine import EventEngine
from pipefit.simulate.flat_program import flat_program
from pipefit.simulate.prices import prices_of
from pipefit.simulate.sharing import Machine
from pipefit.spec import Level, Topology


def timeline(program, cores, *, forward=2.0, backward=4.0, latency=0.0, repeats=1, **more):
    num_ranks = len(program.ranks)
    topology = Topology.local(num_ranks * more.get("tensor", 1), 1e30, latency, cores=cores)
    stages = program.header.num_stages
    cost = CostModel((forward,) * stages, (backward / 2,) * stages, (backward / 2,) * stages, topology=topology, **more)
    return simulate(program, cost, repeats=repeats)


def copies(num, m=1):
    """Data parallelism: each rank has the whole model, and nothing to wait for but the reduction."""
    return generate("data-parallel", Shape(num, m * num))


@pytest.mark.parametrize(("num", "cores"), [(2, 1), (3, 1), (3, 2), (5, 2), (4, 3)])
def test_equal_work_of_n_ranks_takes_n_over_c_times_as_long(num, cores):
    alone, shared = (timeline(copies(num, 3), c).makespan_s for c in (num, cores))
    assert alone == pytest.approx(18)
    assert shared == pytest.approx(18 * num / cores)


def test_what_is_left_alone_goes_at_full_speed():
    machine = Machine(1)
    machine.begin(0, 1, 0)
    machine.begin(0, 3, 1)
    assert machine.end() == (2, 0)  # both at half speed until the shorter is done
    assert machine.end() == (4, 1)  # two seconds of work left, alone


def test_who_comes_later_slows_the_others_from_then_on():
    machine = Machine(2)
    machine.begin(0, 3, 0)
    machine.begin(0, 6, 1)
    machine.begin(1, 2, 2)  # each at 2/3: rank 0 and rank 2 have two seconds left
    assert machine.end() == (pytest.approx(4), 0)
    assert machine.end() == (pytest.approx(4), 2)
    assert machine.end() == (pytest.approx(7), 1)


def test_ranks_that_wait_take_no_core():
    program = generate("naive", Shape(3, 2))
    assert timeline(program, 1).makespan_s == timeline(program, 3).makespan_s == 2 * 3 * 6


def test_a_pipeline_on_one_core_takes_as_long_as_all_its_work():
    assert timeline(generate("1f1b", Shape(3, 6)), 1).makespan_s == pytest.approx(3 * 6 * 6)


def test_two_processes_of_a_rank_need_two_cores():
    program = copies(2, 2)
    assert timeline(program, 4, tensor=2).makespan_s == pytest.approx(12)
    assert timeline(program, 2, tensor=2).makespan_s == pytest.approx(24)
    assert timeline(copies(1, 2), 1, tensor=2).makespan_s == pytest.approx(24)


def test_machines_do_not_share_their_cores():
    servers = Topology((Level("server", 2, 1e30, cores=1), Level("rack", 2, 1e30)))
    crowded = CostModel((2.0,), (2.0,), (2.0,), topology=servers)
    assert simulate(copies(4), crowded).makespan_s == pytest.approx(12)
    assert [crowded.machine_of(rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert grouped(servers, 2).machine == (1, 0.5)


rounds = st.integers(1, 9).map(Fraction)


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "interleaved", "breadth-first", "pipedream", "data-parallel"]),
    st.integers(1, 4),
    st.integers(1, 3),
    rounds,
    rounds,
    st.integers(0, 4).map(Fraction),
    st.integers(1, 3),
)
def test_with_a_core_for_each_rank_sharing_them_changes_no_time(name, p, k, f, b, latency, repeats):
    program = generate(name, Shape(p, p * k, num_chunks=2 if name in ("interleaved", "breadth-first") else 1))
    cost = unit(program.header, f, b, latency=latency)
    layout = flat_program(program)
    prices = prices_of(layout, cost)
    one = EventEngine(layout, prices, repeats)
    many = EventEngine(layout, prices, repeats, cores=[Machine(p)] * p)
    one.run()
    many.run()
    assert (one.start, one.end) == (many.start, many.end)


@given(st.sampled_from(["gpipe", "1f1b", "breadth-first", "data-parallel"]), st.integers(2, 4), st.integers(1, 3))
def test_shared_cores_are_never_busier_than_they_are(name, p, cores):
    program = generate(name, Shape(p, p * 2, num_chunks=2 if name == "breadth-first" else 1))
    found = timeline(program, cores, latency=0.5)
    work = sum({Op.FWD: 2.0, Op.BWD: 4.0}.get(i.op, 0.0) for instructions in program.ranks for i in instructions)
    alone = timeline(program, p, latency=0.5).makespan_s
    assert max(work / cores, alone) <= found.makespan_s * (1 + 1e-12)
    assert found.makespan_s <= alone * max(1, p / cores) * (1 + 1e-12)


def test_no_cores_are_refused():
    with pytest.raises(TopologyError, match=r"levels\[0\].cores: expected more than 0"):
        Topology.local(2, cores=0)
