"""Costs of a plan from its profile and topology, and the costs of the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipefit.cost.layer_bytes import ModelBytes
from pipefit.cost.model import CostModel
from pipefit.cost.work import work_of
from pipefit.errors import PlanError
from pipefit.ir.op import Work
from pipefit.spec.plan import COMING_AND_GOING, Figures, Partition, Plan
from pipefit.spec.profile import ARITHMETIC, Layer, Profile
from pipefit.spec.topology import Topology


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane, beyond the profile's time.
        post_s: of posting one message.
        copy_s_per_byte: of a send, on the sender's core.
    """

    overhead_s: float
    post_s: float
    copy_s_per_byte: float = 0.2e-9


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Usual costs where nothing was measured: ranks in one process, or a GPU, whose work hides these costs."""

FREE = RuntimeCosts(0.0, 0.0, copy_s_per_byte=0.0)
"""An executor without costs, with which the planner and `pipefit simulate` compare plans."""


def usual_state(profile: Profile) -> float:
    """Default of optimizer bytes per weight byte: Adam's, with a master copy for a profile by arithmetic in 2 bytes."""
    mixed = profile.source.startswith(ARITHMETIC) and ",bytes=" not in profile.model
    if profile.counted is not None:
        mixed = profile.counted.element_bytes == 2
    if mixed:
        return 6.0
    return 2.0


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
        each = ""
        if tensor > 1:
            each = f" of {tensor} devices"
        raise PlanError(f"the placement has {num_ranks} ranks{each}, the topology {topology.num_devices} devices")
    if plan.microbatch_size not in (0, profile.microbatch_size):
        profile = profile.at(plan.microbatch_size)
    topology = topology.for_elements(profile.element_bytes)
    if state_per_weight is None:
        state_per_weight = usual_state(profile)
    stages = []
    replays_bytes = []
    for stage in partition.stages:
        stages.append(profile.layers_of(stage))
        sizes_bytes = [profile.layers[index].replay_bytes(stage.replays) for index in stage.layers]
        replays_bytes.append(max(sizes_bytes))

    def total(figure: Callable[[Layer], float]) -> Figures:
        return tuple(sum(map(figure, layers)) for layers in stages)

    # Each replica steps its part and keeps the states of it.
    parts = [1] * len(stages)
    if plan.shard != "none":
        parts = list(map(len, plan.placement.ranks))
    held = [profile.weights_of(stage.layers) for stage in partition.stages]
    weights = tuple(whole for whole, _ in held)
    trained = tuple(learned for _, learned in held)
    steps_s: Figures = ()
    optim_bytes: Figures = ()
    for stage, size, num in zip(partition.stages, trained, parts, strict=True):
        steps_s += (profile.optimizer_of(stage.layers) / num,)
        optim_bytes += (size * (state_per_weight / num + profile.added_per_byte),)
    shards = [0.0] * len(stages)
    sums = [0.0] * len(stages)
    gathered: set[int] = set()
    for index, num in enumerate(parts):
        if num > 1 and plan.shard in COMING_AND_GOING:
            sums[index] = trained[index] / num
        if num > 1 and plan.shard == "weights":
            shards[index] = weights[index] / num
            gathered.add(index)
    inputs_s = total(lambda layer: layer.backward_input_s)
    weights_s = total(lambda layer: layer.backward_weight_s)
    grads = profile.crossing(partition, _grad_bytes)
    first = plan.frozen
    none = (0.0,) * first
    tiers = topology.tiers_among(num_ranks)
    host_steps_s = steps_s
    for tier in tiers:
        if tier.name == "host" and tier.step_bytes_per_s:
            host_steps_s = tuple(size / tier.step_bytes_per_s for size in trained)
    cost = CostModel(
        forward_s=total(lambda layer: layer.forward_s),
        # No stage below the first one that trains needs a gradient: all of its backward can wait for its second half.
        backward_input_s=(*none, 0.0, *inputs_s[first + 1 :]),
        backward_weight_s=(*none, inputs_s[first] + weights_s[first], *weights_s[first + 1 :]),
        split_s=(*none, 0.0, *total(lambda layer: layer.split_s or 0)[first + 1 :]),
        split_input_s=(*none, 0.0, *total(lambda layer: layer.split_input_s)[first + 1 :]),
        step_s=steps_s,
        host_step_s=host_steps_s,
        loss_s=profile.loss_s,
        act_bytes=profile.crossing(partition, lambda layer: layer.output_bytes),
        grad_bytes=grads,
        saved_bytes=total(lambda layer: layer.saved_bytes),
        replay_bytes=tuple(replays_bytes),
        half_bytes=(*none, grads[first], *total(lambda layer: layer.kept_bytes)[first + 1 :]),
        weight_bytes=weights,
        wgrad_bytes=trained,
        optim_bytes=optim_bytes,
        shard_bytes=tuple(shards),
        sum_bytes=tuple(sums),
        gathered=frozenset(gathered),
        summed_per_byte=profile.summed_per_byte,
        overlapped=profile.overlapped,
        topology=topology,
        speed=speeds_of(topology, tensor),
        tiers=tiers,
        tensor=tensor,
        **runtime._asdict(),
    )
    if profile.knows_work:
        cost = replace(cost, work_bytes=_work_of(profile, partition, stages, cost, parts))
    if sizes is None:
        return cost
    return replace(cost, **sizes.figures(cost, plan))


def _work_of(
    profile: Profile,
    partition: Partition,
    stages: Sequence[Sequence[Layer]],
    cost: CostModel,
    parts: Sequence[int],
) -> dict[str, Figures]:
    """The memory that each stage takes and frees while its instructions run.

    A replica steps its part, in which a weight may be whole. With Gloo it receives from every other replica as many
    gradients as it keeps, and sums them; other libraries sum on the way.
    """
    rows = []
    entering = widened = 0.0
    for stage, layers in enumerate(stages):
        grad = cost.grad_bytes[stage]
        received = 0.0
        if profile.device.startswith("cpu"):
            received = 1 - 1 / parts[stage]
        row = work_of(layers, cost.act_bytes[stage], grad, entering, received, widened)
        row[Work.LOSS.value] = max(profile.loss_work_bytes - grad, 0.0)
        whole = profile.step_work_of(partition.stages[stage].layers)
        every = sum(layer.step_work_bytes for layer in layers)
        row[Work.STEP.value] = min(whole, every / parts[stage])
        rows.append(row)
        entering = grad
        widened = layers[-1].inner_bytes or 0.0
    return {kind: tuple(row[kind] for row in rows) for kind in map(str, Work)}


def _grad_bytes(layer: Layer) -> float:
    if layer.grad_bytes is None:
        return layer.output_bytes
    return layer.grad_bytes


def speeds_of(topology: Topology, tensor: int = 1) -> Figures:
    """Speed of each rank over the device of the profile; (): all alike. The slowest of t devices sets a rank's."""
    have_flops = all(device.flops for device in topology.devices)
    if not topology.devices or not have_flops:
        return ()
    reference = topology.device
    if not reference.flops:
        reference = topology.devices[0]
    usable = reference.flops * reference.efficiency
    speeds = [device.flops * device.efficiency / usable for device in topology.devices]
    slowest = []
    for first in range(0, len(speeds), tensor):
        group = speeds[first : first + tensor]
        slowest.append(min(group))
    return tuple(slowest)
