"""Memory of the ranks of a plan as cost model and simulator predict it, from a model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipefit.cost import CostModel, of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.errors import PipefitError
from pipefit.ir.program import Program
from pipefit.profiling import analytic_profile
from pipefit.runtime.microbatches import largest_part
from pipefit.simulate import simulate
from pipefit.spec import Device, Plan, Topology
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Loss


class PredictedMemory(NamedTuple):
    """Predicted bytes of a rank, each of its processes alike.

    Attributes:
        weight_bytes: of its weights.
        grad_bytes: of the gradients of the weights that train.
        optim_bytes: of the optimizer's states.
        peak_bytes: the most that it holds in a pass.
    """

    weight_bytes: float
    grad_bytes: float
    optim_bytes: float
    peak_bytes: float


def plan_costs(
    layers: Sequence[NamedLayer], loss: Loss, batch: tuple[Any, Any], plan: Plan, state_per_weight: float
) -> CostModel | None:
    """The costs of a plan whose bytes are those of a model; its seconds are those of an arbitrary device.

    None where the layers cannot be counted on tensors without data.

    Args:
        layers: of the whole model.
        loss: of an output and its target.
        batch: (input, target) of one update.
        plan: of the run.
        state_per_weight: bytes that the optimizer keeps for each byte of weights.
    """
    x, y = batch
    device = Device(flops=1e14, efficiency=1.0)
    topology = Topology.local(plan.num_processes)
    if plan.partition.num_layers != len(layers):
        return None
    try:
        size = largest_part(x, plan.num_microbatches)
        profile = analytic_profile(layers, x, device, loss, y, microbatch_size=size)
    except (PipefitError, RuntimeError, NotImplementedError, TypeError):
        return None
    shard = tensor_shard(profile, plan.tensor, topology)
    return of_plan(shard, plan, topology, state_per_weight=state_per_weight)


def predicted_memory(program: Program, cost: CostModel) -> list[PredictedMemory]:
    """The predicted memory of each rank of a program."""
    timeline = simulate(program, cost)
    found = []
    for rank in range(program.header.num_ranks):
        stages = program.header.stages_of(rank)
        found.append(
            PredictedMemory(
                sum(cost.shard_bytes[stage] or cost.weight_bytes[stage] for stage in stages),
                sum(cost.sum_bytes[stage] or cost.wgrad_bytes[stage] for stage in stages),
                sum(cost.optim_bytes[stage] for stage in stages),
                timeline.peak_bytes(rank),
            )
        )
    return found
