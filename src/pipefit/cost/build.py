"""Where costs come from: the lectures' unit costs, or a profile on a topology."""

from __future__ import annotations

import math
from collections.abc import Callable

from pipefit.cost.model import CostModel
from pipefit.errors import PlanError
from pipefit.ir.program import Header
from pipefit.spec.plan import Partition, Placement
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Tier, Topology

__all__ = ["from_profile", "unit"]


def unit(
    header: Header,
    forward: float = 1,
    backward: float | None = None,
    *,
    input: float | None = None,
    weight: float | None = None,
    latency: float = 0,
    copy: float = 2,
) -> CostModel:
    """The lectures' costs: a rank spends `forward` and `backward` on a micro-batch over all its stages.

    A stage costs forward·num_ranks/num_stages: a chunk costs 1/v, and the one stage of data parallelism costs p times
    as much. Saved activations are counted in micro-batches of a rank's layers; nothing else has a size.

    Args:
        header: of the program.
        forward: seconds per rank and micro-batch.
        backward: of a full backward; default input + weight, or 2.
        input: its half for the gradient of the input; default what `weight` leaves, or half.
        weight: its other half.
        latency: seconds of a message.
        copy: seconds of moving all stages of a rank to or from the tier they are spilled to, weights or states alike;
            a step on the host takes twice as long.

    Raises:
        PlanError: backward is not input + weight.
    """
    input, weight = _halves(backward, input, weight)
    num_stages = header.num_stages

    def every(total: float) -> tuple[float, ...]:
        return (_divide(total * header.num_ranks, num_stages),) * num_stages

    return CostModel(
        forward_s=every(forward),
        backward_input_s=every(input),
        backward_weight_s=every(weight),
        host_step_s=(_divide(2 * copy * header.num_ranks, num_stages),) * num_stages,
        saved_bytes=tuple(1 / len(header.stages_of(ranks[0])) for ranks in header.placement),
        latency_s=latency,
        tiers=_unit_tiers(header, _divide(copy * header.num_ranks, num_stages)),
        tensor=header.tensor,
    )


def _unit_tiers(header: Header, copy: float) -> tuple[Tier, ...]:
    """The tier of a program that spills: every copy of a stage takes as long."""
    if header.spill is None:
        return ()
    return (Tier(header.spill.tier, math.inf, math.inf, math.inf, latency_s=copy),)


def _halves(backward: float | None, input: float | None, weight: float | None) -> tuple[float, float]:
    if backward is None:
        return (1 if input is None else input), (1 if weight is None else weight)
    if input is None:
        input = _divide(backward, 2) if weight is None else backward - weight
    if weight is None:
        weight = backward - input
    if input + weight != backward:
        raise PlanError(f"expected backward = input + weight, got {backward} and {input} + {weight}")
    return input, weight


def _divide(a: float, b: int) -> float:
    """A / b; whole where both are and b divides a, so that whole costs give whole times."""
    return a // b if isinstance(a, int) and a % b == 0 else a / b


def from_profile(
    profile: Profile,
    partition: Partition,
    topology: Topology,
    *,
    placement: Placement | None = None,
    microbatch_size: int | None = None,
    optimizer_bytes_per_weight_byte: float = 0,
    step_s_per_weight_byte: float = 0,
    input_bytes: float = 0,
    target_bytes: float = 0,
    loss_s: float = 0,
    load_s: float = 0,
    post_s: float = 0,
    copy_s_per_byte: float = 0,
    overhead_s: float = 0,
    weight_scale: float = 1,
    data_scale: float = 1,
) -> CostModel:
    """Costs of a partition of a profile on a topology.

    Tensor parallelism divides a stage's work, saved bytes and weights by its width; the communication inside the
    group is not counted here (`pipefit.cost.tensor.widened` does, for a GPT). Devices that differ scale by their usable
    FLOP/s, relative to the topology's `device` (which the profile is then taken to be measured on), or to the first of
    `devices`.

    Args:
        profile: seconds and bytes per layer at the profile's micro-batch size.
        partition: layers of each stage.
        topology: links, device speeds and tiers.
        placement: checked to fit the topology when given.
        microbatch_size: seconds and bytes of data are scaled to it linearly; None: the profile's own.
        optimizer_bytes_per_weight_byte: state of the optimizer: 0 for SGD, 1 with momentum, 2 for Adam.
        step_s_per_weight_byte: of the optimizer step.
        input_bytes: of a micro-batch at the size asked for.
        target_bytes: likewise.
        loss_s: likewise.
        load_s: likewise.
        post_s: see `CostModel`.
        copy_s_per_byte: see `CostModel`.
        overhead_s: see `CostModel`.
        weight_scale: bytes of a weight as trained over bytes in the profile (0.5 for half precision).
        data_scale: the same for activations and their gradients.

    Raises:
        PlanError: partition and profile, or placement and topology, do not belong together.
    """
    if partition.num_layers != len(profile):
        raise PlanError(f"the partition has {partition.num_layers} layers, the profile {len(profile)}")
    tensor = partition.stages[0].tensor
    if placement is not None and placement.num_ranks * tensor > topology.num_devices:
        each = f" of {tensor} devices" if tensor > 1 else ""
        raise PlanError(
            f"the placement has {placement.num_ranks} ranks{each}, the topology {topology.num_devices} devices"
        )
    scale = 1 if microbatch_size is None else microbatch_size / profile.microbatch_size

    def total(figure: Callable[[Layer], float], factor: float = 1) -> tuple[float, ...]:
        return tuple(
            sum(figure(profile.layers[index]) for index in stage.layers) * factor / stage.tensor
            for stage in partition.stages
        )

    weights = total(lambda layer: layer.weight_bytes, weight_scale)
    inputs_s = total(lambda layer: layer.backward_input_s, scale)
    weights_s = total(lambda layer: layer.backward_weight_s, scale)
    split_s = total(lambda layer: layer.split_s or 0, scale)
    split_input_s = total(lambda layer: layer.split_input_s, scale)
    grads = _crossing(profile, partition, _grad_bytes, scale * data_scale)
    halves = total(lambda layer: layer.kept_bytes, scale * data_scale)
    return CostModel(
        forward_s=total(lambda layer: layer.forward_s, scale),
        # The model's input needs no gradient: all of the first stage's backward can wait for its second half.
        backward_input_s=(0.0, *inputs_s[1:]),
        backward_weight_s=(inputs_s[0] + weights_s[0], *weights_s[1:]),
        split_s=(0.0, *split_s[1:]),
        split_input_s=(0.0, *split_input_s[1:]),
        step_s=tuple(size * step_s_per_weight_byte for size in weights),
        host_step_s=tuple(size / rate for size in weights) if (rate := _host_rate(topology)) else (),
        loss_s=loss_s,
        load_s=load_s,
        act_bytes=_crossing(profile, partition, lambda layer: layer.output_bytes, scale * data_scale),
        grad_bytes=grads,
        saved_bytes=total(lambda layer: layer.saved_bytes, scale * data_scale),
        half_bytes=(grads[0], *halves[1:]),
        weight_bytes=weights,
        optim_bytes=tuple(size * optimizer_bytes_per_weight_byte for size in weights),
        input_bytes=input_bytes,
        target_bytes=target_bytes,
        topology=topology,
        post_s=post_s,
        copy_s_per_byte=copy_s_per_byte,
        overhead_s=overhead_s,
        speed=_speeds(topology, tensor),
        tiers=topology.tiers,
        tensor=tensor,
    )


def _grad_bytes(layer: Layer) -> float:
    return layer.output_bytes if layer.grad_bytes is None else layer.grad_bytes


def _crossing(
    profile: Profile, partition: Partition, figure: Callable[[Layer], float], scale: float
) -> tuple[float, ...]:
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
            sizes[cut] += figure(profile.layers[layer]) * scale
    return tuple(sizes)


def _speeds(topology: Topology, tensor: int) -> tuple[float, ...]:
    """Of each rank; one of several devices is as fast as the slowest of them."""
    if not topology.devices or not all(device.flops for device in topology.devices):
        return ()
    reference = topology.device if topology.device.flops else topology.devices[0]
    usable = reference.flops * reference.efficiency
    speeds = [device.flops * device.efficiency / usable for device in topology.devices]
    return tuple(min(speeds[first : first + tensor]) for first in range(0, len(speeds), tensor))


def _host_rate(topology: Topology) -> float:
    """Bytes of weights per second that step in the host's memory; 0: not known."""
    return next((tier.step_bytes_per_s for tier in topology.tiers if tier.name == "host"), 0.0)
