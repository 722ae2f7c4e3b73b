"""Costs of a plan from its profile and topology, and the costs of the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from pipefit.cost.layer_bytes import ModelBytes
from pipefit.cost.model import CostModel
from pipefit.errors import PlanError
from pipefit.spec.plan import Partition, Plan
from pipefit.spec.profile import ARITHMETIC, Layer, Profile
from pipefit.spec.topology import Topology


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane that `host_s` does not name, beyond the profile's time.
        post_s: of posting one message.
        host_s: on instructions by operation, beyond the profile's time.
        pass_s: of a rank before each pass over the program.
        copy_s_per_byte: of a send, on the sender's core.
        arrival_s: on an arrived message, where no core is left for the threads that carry it.
    """

    overhead_s: float
    post_s: float
    host_s: Mapping[str, float] = MappingProxyType({})
    pass_s: float = 0.0
    copy_s_per_byte: float = 0.2e-9
    arrival_s: float = 0.0


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Usual costs where nothing was measured: ranks in one process, or a GPU, whose work hides these costs."""

FREE = RuntimeCosts(0.0, 0.0, copy_s_per_byte=0.0)
"""An executor without costs, with which the planner and `pipefit simulate` compare plans."""


def usual_state(profile: Profile) -> float:
    """Default of optimizer bytes per weight byte: Adam's, with a master copy for a profile by arithmetic in 2 bytes."""
    mixed = profile.source.startswith(ARITHMETIC) and ",bytes=" not in profile.model
    return 6.0 if mixed else 2.0


def of_plan(
    profile: Profile,
    plan: Plan,
    topology: Topology,
    *,
    state_per_weight: float | None = None,
    runtime: RuntimeCosts = USUAL,
    sizes: ModelBytes | None = None,
) -> CostModel:
    """Costs of a plan's stages on a topology.

    Devices that differ scale by their usable FLOP/s, relative to the topology's `device` (on which the profile is then
    assumed to be measured), or to the first of `devices`. Ranks of one machine share the rates of its tiers.

    Args:
        profile: seconds and bytes per layer; they are taken at the plan's micro-batch size. With tensor parallelism
            they are those of one process of a rank: measured (`pipefit.calibrate.tensor_shard`) or computed
            (`pipefit.cost.tensor.tensor_shard`).
        plan: stages, their ranks, and other settings that affect costs: sharded optimizer, tensor width, spilling.
        topology: links, device speeds and tiers.
        state_per_weight: optimizer bytes per byte of the weights that train: 0 for SGD, 1 with momentum, 2 for Adam;
            None: see `usual_state`.
        runtime: costs of the executor; `FREE` compares plans.
        sizes: exact bytes of the layers; None: those of the profile.

    Raises:
        PlanError: plan and profile, or plan and topology, do not belong together.
    """
    partition = plan.partition
    tensor = plan.tensor
    num_ranks = plan.placement.num_ranks
    if partition.num_layers != len(profile):
        raise PlanError(f"the partition has {partition.num_layers} layers, the profile {len(profile)}")
    if num_ranks * tensor > topology.num_devices:
        if tensor > 1:
            each = f" of {tensor} devices"
        else:
            each = ""
        raise PlanError(f"the placement has {num_ranks} ranks{each}, the topology {topology.num_devices} devices")
    if plan.microbatch_size not in (0, profile.microbatch_size):
        profile = profile.at(plan.microbatch_size)
    if state_per_weight is None:
        state = usual_state(profile)
    else:
        state = state_per_weight

    stages = [[profile.layers[index].replaying(s.replays) for index in s.layers] for s in partition.stages]

    def total(figure: Callable[[Layer], float]) -> tuple[float, ...]:
        return tuple(sum(map(figure, layers)) for layers in stages)

    replays = [[profile.layers[index].replay_bytes(s.replays) for index in s.layers] for s in partition.stages]

    # Each replica steps its part and keeps the states of it.
    parts = [len(ranks) if plan.sharded_optimizer else 1 for ranks in plan.placement.ranks]
    steps_s = tuple(profile.optimizer_of(s.layers) / num for s, num in zip(partition.stages, parts, strict=True))
    inputs_s = total(lambda layer: layer.backward_input_s)
    weights_s = total(lambda layer: layer.backward_weight_s)
    grads = _crossing(profile, partition, lambda x: x.output_bytes if x.grad_bytes is None else x.grad_bytes)
    trained = total(lambda layer: layer.wgrad_bytes)
    first = plan.frozen
    none = (0.0,) * first
    tiers = topology.tiers_among(num_ranks)
    host_rate = next((tier.step_bytes_per_s for tier in tiers if tier.name == "host"), 0.0)
    cost = CostModel(
        forward_s=total(lambda layer: layer.forward_s),
        # No stage below the first one that trains needs a gradient: all of its backward can wait for its second half.
        backward_input_s=(*none, 0.0, *inputs_s[first + 1 :]),
        backward_weight_s=(*none, inputs_s[first] + weights_s[first], *weights_s[first + 1 :]),
        split_s=(*none, 0.0, *total(lambda layer: layer.split_s or 0)[first + 1 :]),
        split_input_s=(*none, 0.0, *total(lambda layer: layer.split_input_s)[first + 1 :]),
        step_s=steps_s,
        host_step_s=tuple(size / host_rate for size in trained) if host_rate else steps_s,
        loss_s=profile.loss_s,
        act_bytes=_crossing(profile, partition, lambda layer: layer.output_bytes),
        grad_bytes=grads,
        saved_bytes=total(lambda layer: layer.saved_bytes),
        replay_bytes=tuple(map(max, replays)),
        half_bytes=(*none, grads[first], *total(lambda layer: layer.kept_bytes)[first + 1 :]),
        weight_bytes=total(lambda layer: layer.weight_bytes),
        wgrad_bytes=trained,
        optim_bytes=tuple(size * state / num for size, num in zip(trained, parts, strict=True)),
        topology=topology,
        speed=speeds_of(topology, tensor),
        tiers=tiers,
        tensor=tensor,
        **runtime._asdict(),
    )
    if sizes is None:
        return cost
    return replace(cost, **sizes.figures(cost, plan))


def _crossing(profile: Profile, partition: Partition, figure: Callable[[Layer], float]) -> tuple[float, ...]:
    """For each stage, the bytes that cross the cut after it: every output used beyond it, counted once.

    After the last stage: its outputs that nothing uses, which the loss reads.
    """
    owner = {layer: stage for stage, spec in enumerate(partition.stages) for layer in spec.layers}
    reach = {layer: owner[layer] for layer in owner}
    used = set()
    for tail, head in profile.links:
        if owner[head] < owner[tail]:
            names = profile.layers[tail].name, profile.layers[head].name
            raise PlanError(f"stage {owner[head]} needs {names[0]} of the later stage {owner[tail]} for {names[1]}")
        reach[tail] = max(reach[tail], owner[head])
        used.add(tail)
    num_stages = len(partition.stages)
    sizes = [0.0] * num_stages
    for layer, stage in owner.items():
        read_by_loss = layer not in used and stage == num_stages - 1
        for cut in range(stage, num_stages if read_by_loss else reach[layer]):
            sizes[cut] += figure(profile.layers[layer])
    return tuple(sizes)


def speeds_of(topology: Topology, tensor: int = 1) -> tuple[float, ...]:
    """Speed of each rank over the device of the profile; (): all alike. The slowest of t devices sets a rank's."""
    if not topology.devices or not all(device.flops for device in topology.devices):
        return ()
    if topology.device.flops:
        reference = topology.device
    else:
        reference = topology.devices[0]
    usable = reference.flops * reference.efficiency
    speeds = [device.flops * device.efficiency / usable for device in topology.devices]
    return tuple(min(speeds[first : first + tensor]) for first in range(0, len(speeds), tensor))
