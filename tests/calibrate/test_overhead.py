"""Costs of the executor from known times: no clock is read here."""

from types import SimpleNamespace

import pytest

from pipefit.calibrate.overhead import _costs, arrival_s, runtime_costs
from pipefit.cost import USUAL, of_plan
from pipefit.planner import by_hand
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Layer, Profile, Topology
from pipefit.timeline import by_kind

PROFILE = Profile("m", 1, tuple(Layer(f"l{k}", 1e-3, 1e-3, 1e-3, 0, 0, 4) for k in range(2)), loss_s=2e-3)


def test_a_cost_is_the_time_in_the_executor_less_the_layers_the_mean_of_the_stages():
    layers = {("fwd", 0): 1.2e-3, ("fwd", 1): 1.4e-3, ("bwd", 0): 2.1e-3, ("bwd", 1): 2.3e-3, ("step", 0): 4e-4}
    costs = _costs(layers | {("loss", -1): 1e-3, ("load", 0): 5e-5, ("send", 0): 1e-4, ("recv", 1): 9.0}, PROFILE)
    expected = {"fwd": 3e-4, "bwd": 2e-4, "step": 4e-4, "load": 5e-5, "send": 1e-4}
    halves = {"recompute": 3e-4, "bwd_input": 2e-4, "bwd_weight": 2e-4}
    # A loss that took less than in the profile costs next to nothing, and never less than that.
    assert costs.host_s == pytest.approx(expected | halves | {"loss": 1e-6})
    assert (costs.overhead_s, costs.post_s) == pytest.approx((3e-4, 1e-4))


def test_the_cost_of_messages_is_the_one_with_which_the_passes_were_simulated():
    plan = by_hand(2, num_ranks=2, schedule="1f1b", num_microbatches=16, stages=[1, 1])
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    costs = USUAL._replace(host_s={"load": 0.0})
    cost = of_plan(PROFILE, plan, links, state_per_weight=0.0, runtime=costs._replace(arrival_s=3e-4))
    timeline = simulate(program_of(plan), cost, repeats=8)
    kinds = {key: item.median_s for key, item in by_kind(timeline).items()}
    pipe = SimpleNamespace(plan=plan)
    assert arrival_s(timeline, kinds, costs, pipe, PROFILE, links) == pytest.approx(3e-4, rel=0.1)


def test_a_run_of_one_process_has_the_usual_costs():
    assert runtime_costs(Session(0, 1, None, Progress()), Topology.local(1)) == USUAL
