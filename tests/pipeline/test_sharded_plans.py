"""The planner divides optimizers where that makes a plan fit, knows what it then takes, and the plan runs as it is."""

import json

import msgspec
import pytest
import torch
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline
from pipefit.cost import of_plan
from pipefit.errors import InfeasibleError
from pipefit.planner import plan
from pipefit.runtime.worker import Worker
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Layer, Plan, Profile, Topology

WIDTH, LAYERS = 64, 4
WEIGHTS = 4 * WIDTH * WIDTH
PROFILE = Profile(
    "four",
    4,
    tuple(Layer(f"layer{i}", 1e-3, 1e-3, 1e-3, 4 * 4 * WIDTH, 4 * 4 * WIDTH, WEIGHTS) for i in range(LAYERS)),
)


def machine(memory_bytes: float) -> Topology:
    local = Topology.local(2)
    return msgspec.structs.replace(local, device=msgspec.structs.replace(local.device, memory_bytes=memory_bytes))


def found(memory_bytes: float, **options: object) -> Plan:
    return plan(PROFILE, machine(memory_bytes), global_batch=8, depths=(1,), **options)


def test_a_sharded_optimizer_makes_plans_fit_that_would_not() -> None:
    # Weights, gradients and two states: 4 with whole optimizers, 3 with halves of them.
    small = 3.5 * LAYERS * WEIGHTS
    made = found(small)
    assert made.shard == "optimizer"
    assert made.data == 2
    with pytest.raises(InfeasibleError):
        found(small, shard="none")
    assert found(100 * small, shard="none").shard == "none"


def test_what_is_predicted_is_what_the_program_holds() -> None:
    made = found(3.5 * LAYERS * WEIGHTS)
    assert made.prediction is not None
    timeline = simulate(program_of(made), of_plan(PROFILE, made, machine(1e9)))
    whole = msgspec.structs.replace(made, shard="none")
    for rank in range(2):
        assert made.prediction.peak_bytes[rank] == pytest.approx(timeline.peak_bytes(rank), rel=0.02)
        saved = simulate(program_of(whole), of_plan(PROFILE, whole, machine(1e9))).peak_bytes(rank)
        assert saved - timeline.peak_bytes(rank) == pytest.approx(LAYERS * WEIGHTS)


def test_such_a_plan_runs_as_it_is() -> None:
    made = found(3.5 * LAYERS * WEIGHTS)
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        plan=made,
    )
    x = torch.randn(8, WIDTH)
    assert pipe.step(x, x) > 0
    for worker in pipe.workers:
        assert held(worker) == LAYERS * WEIGHTS  # two states of half the weights


def test_who_asks_for_it_gets_it_with_any_plan() -> None:
    made = found(1e9, shard="none")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    settings = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.Adam, "plan": made}
    assert Pipeline(model, **grouped(**settings)).program.header.shard == "none"
    assert Pipeline(model, **grouped(shard="optimizer", **settings)).program.header.shard == "optimizer"


def test_a_plan_of_before_there_were_levels_is_read(tmp_path) -> None:
    plan = msgspec.structs.replace(found(1e9, shard="none"), shard="optimizer")
    data = json.loads(plan.save(tmp_path / "plan.json").read_text())
    del data["shard"]
    (tmp_path / "old.json").write_text(json.dumps({**data, "sharded_optimizer": True}))
    (tmp_path / "none.json").write_text(json.dumps({**data, "sharded_optimizer": False}))
    assert Plan.load(tmp_path / "old.json") == plan
    assert Plan.load(tmp_path / "none.json").shard == "none"


def held(worker: Worker) -> int:
    """Bytes of the states of a rank's optimizers, beside step counters."""
    states = [state for optimizer in worker.optimizers.values() for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for key, value in state.items() if key != "step")
