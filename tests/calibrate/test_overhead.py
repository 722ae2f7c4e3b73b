"""Costs of the executor from known times: no clock is read here."""

import pytest

from pipefit.calibrate.overhead import costs_of, runtime_costs
from pipefit.cost import USUAL, of_plan
from pipefit.planner import by_hand
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Layer, Profile, Topology
from pipefit.timeline import Timeline

PROFILE = Profile("m", 1, tuple(Layer(f"l{k}", 1e-3, 1e-3, 1e-3, 0, 0, 4) for k in range(2)), loss_s=2e-3)


def passes() -> Timeline:
    """Passes over layers of 1 ms by an executor whose forward takes 0.3 ms more, and a send 0.1 ms."""
    plan = by_hand(2, num_ranks=2, schedule="1f1b", num_microbatches=16, stages=[1, 1])
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    executor = USUAL._replace(overhead_s=3e-4, post_s=1e-4, copy_s_per_byte=0.0)
    cost = of_plan(PROFILE, plan, links, state_per_weight=0.0, runtime=executor)
    return simulate(program_of(plan), cost, repeats=8)


def test_the_costs_are_those_with_which_the_passes_were_simulated():
    overhead_s, post_s = costs_of(passes(), layer_s=1e-3)
    assert overhead_s == pytest.approx(3e-4)
    assert post_s == pytest.approx(1e-4, rel=0.1)


def test_a_layer_that_is_slower_in_isolation_leaves_the_usual_overhead():
    assert costs_of(passes(), layer_s=1.0)[0] == USUAL.overhead_s


def test_a_run_of_one_process_has_the_usual_costs():
    assert runtime_costs(Session(0, 1, None, Progress())) == USUAL
