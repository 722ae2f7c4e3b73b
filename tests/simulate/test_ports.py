"""Links that share a port: what leaves a rank, or reaches it, goes one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cost import CostModel
from pipefit.errors import PlanError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.spec import Level, Topology
from pipefit.timeline import waited_for


def lab(num_ranks, port=True, bandwidth=1, **rest):
    return Topology((Level("lab", num_ranks, bandwidth, 0, one_port=port, **rest),))


def cost_of(num_stages, topology, act=10, weights=0):
    one = (1,) * num_stages
    return CostModel(one, one, one, act_bytes=(act,) * num_stages, weight_bytes=(weights,) * num_stages,
                     topology=topology)  # fmt: skip


def arrivals(timeline, kind="act"):
    found = [(e.end_s, e.rank) for e in timeline.events
             if timeline.instruction(e).op is Op.RECV and timeline.instruction(e).kind == kind]  # fmt: skip
    return sorted(found)


def test_one_sender_and_two_receivers_share_the_senders_port():
    program = generate("gpipe", Shape(2, 4, replicas=(1, 2)))
    assert arrivals(simulate(program, cost_of(2, lab(3, port=False)))) == [(11, 1), (12, 2), (13, 1), (14, 2)]
    timeline = simulate(program, cost_of(2, lab(3)))
    assert arrivals(timeline) == [(11, 1), (21, 2), (31, 1), (41, 2)]
    held_up = [
        waited_for(timeline, e) for e in timeline.events if e.rank == 2 and timeline.instruction(e).op is Op.RECV
    ]
    assert [(wait.reason, wait.by.end_s) for wait in held_up[:2]] == [("link", 11), ("link", 31)]


def test_two_senders_and_one_receiver_share_the_receivers_port():
    program = generate("gpipe", Shape(2, 4, replicas=(2, 1), ahead=3))
    assert [end for end, _ in arrivals(simulate(program, cost_of(2, lab(3, port=False))))] == [11, 11, 12, 12]
    assert [end for end, _ in arrivals(simulate(program, cost_of(2, lab(3))))] == [11, 21, 31, 41]


@given(st.integers(20, 30), st.integers(1, 9), st.integers(1, 9))
def test_a_rank_in_the_middle_sends_on_and_back_through_one_port(m, act, grad):
    """Activations on and gradients back, m of each: no less than m(a + g)/B, and less where each link is by itself."""
    program = generate("gpipe", Shape(3, m)) if act == grad else generate("1f1b", Shape(3, m))
    given_s = {"act_bytes": (act, act, 0), "grad_bytes": (grad, grad, 0)}
    zero = (0, 0, 0)
    shared, apart = (
        simulate(program, CostModel(zero, zero, zero, topology=lab(3, port), **given_s)) for port in (True, False)
    )
    assert shared.makespan_s >= m * (act + grad)
    assert apart.makespan_s < shared.makespan_s


@given(st.sampled_from(["naive", "gpipe", "1f1b", "pipedream"]), st.integers(2, 8), st.integers(0, 6))
def test_between_two_ranks_a_port_is_a_link(name, m, act):
    """Each direction is by itself: a port lets out and in at the same time."""
    program = generate(name, Shape(2, m, num_steps=2))
    ports = simulate(program, cost_of(2, lab(2), act))
    links = simulate(program, cost_of(2, lab(2, port=False), act), contention=True)
    assert ports.events == links.events


def test_reductions_through_the_same_port_come_one_after_the_other():
    """Two servers of two ranks; both stages are summed between the servers, through one card each."""
    program = generate("gpipe", Shape(2, 2, replicas=(2, 2)))
    assert program.header.placement == ((0, 2), (1, 3))

    def ends(port):
        topology = Topology((Level("server", 2, 1, 0), Level("rack", 2, 1, 0, one_port=port)))
        timeline = simulate(program, cost_of(2, topology, act=0, weights=100))
        return sorted({e.end_s for e in timeline.events if timeline.instruction(e).op is Op.REDUCE})

    # 2(d − 1)/d · W/B = 100 s each; the second stage is ready first.
    (first, second), begun = ends(port=True), ends(port=False)
    assert first == begun[0]
    assert second == first + 100
    assert begun[1] < first + 100


def test_a_reduction_keeps_the_ports_of_its_ring_busy():
    rack = Topology((Level("server", 2, 9, 0), Level("rack", 2, 1, 0, one_port=True)))
    reduce = Instruction(Op.REDUCE, 0, kind="replicas", version=0)
    cost = cost_of(1, rack, weights=8)
    assert set(cost.reduction_ports(reduce, [0, 1, 2, 3])) == {
        (way, 1, server) for way in ("out", "in") for server in (0, 1)
    }
    assert cost.reduction_ports(reduce, [0, 1]) == ()
    assert cost_of(1, rack, weights=0).reduction_ports(reduce, [0, 1, 2, 3]) == ()


def test_inside_a_unit_no_port_is_taken_and_its_ranks_share_the_one_out():
    rack = Topology((Level("server", 2, 9, 0), Level("rack", 3, 1, 0, one_port=True)))
    cost = cost_of(1, rack)
    assert cost.ports(0, 1) == ()
    assert cost.ports(0, 2) == (("out", 1, 0), ("in", 1, 1))
    assert cost.ports(1, 5) == (("out", 1, 0), ("in", 1, 2))
    assert cost.port_unit == 2


def test_ports_need_rendezvous():
    program = generate("1f1b", Shape(2, 2))
    with pytest.raises(PlanError, match="contention needs rendezvous"):
        simulate(program, cost_of(2, lab(2)), rendezvous=False)


def test_a_topology_with_a_port_comes_back_from_its_file(tmp_path):
    rack = Topology((Level("server", 2, 9.0, 0.0), Level("rack", 2, 1.0, 0.0, one_port=True)))
    assert Topology.load(rack.save(tmp_path / "rack.toml")) == rack
    assert (tmp_path / "rack.toml").read_text().count("one_port") == 1


def test_a_topology_comes_back_from_its_file_whatever_its_name(tmp_path):
    named = Topology((Level('the "fast" one \\ ü', 2, 1e9),), name='a "name"')
    assert Topology.load(named.save(tmp_path / "named.toml")) == named
