"""Another cut, or other shares of the batch, for ranks whose speeds have been measured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipefit.cost import FREE, of_plan
from pipefit.partition.balance import divide, layer_times, spans
from pipefit.planner.running_costs import Factors
from pipefit.planner.simulated import update_s
from pipefit.planner.space import shares_of
from pipefit.schedules import find
from pipefit.spec import Device, Level, Partition, Plan, Profile, Topology
from pipefit.spec.plan import COMING_AND_GOING


def assumed(profile: Profile, plan: Plan) -> list[float]:
    """The cost of each layer by a profile, with what its backward replays."""
    times = layer_times(msgspec.structs.replace(profile.replaying(plan.partition.stages[0].replays), loss_s=0.0))
    # A layer without cost counts a little, so that it is in proportion to something.
    least = (sum(times) or 1.0) / (100 * len(times))
    return [time + least for time in times]


def with_costs(profile: Profile, plan: Plan, factors: Factors) -> Profile:
    """The profile with the estimated costs of its layers."""
    layers = []
    for layer, before, cost in zip(profile.layers, assumed(profile, plan), factors.costs, strict=True):
        changed = {}
        for name in ("forward_s", "backward_input_s", "backward_weight_s", "attention_s"):
            changed[name] = getattr(layer, name) * cost / before
        layers.append(msgspec.structs.replace(layer, **changed))
    return msgspec.structs.replace(profile, layers=tuple(layers))


def with_speeds_of(topology: Topology, factors: Factors) -> Topology:
    """The topology whose devices have the estimated speeds."""
    devices = []
    one = Device(flops=1.0, efficiency=1.0)
    for slowness in factors.slowness:
        devices.append(Device(flops=1.0 / slowness, efficiency=1.0))
    # A run that has lost ranks has fewer than the topology.
    devices += [one] * (topology.num_devices - len(devices))
    # Measured times hold the effect of shared cores already.
    levels: list[Level] = []
    for level in topology.levels:
        levels.append(msgspec.structs.replace(level, cores=None))
    return msgspec.structs.replace(topology, levels=tuple(levels), device=one, devices=tuple(devices))


def step_s(plan: Plan, profile: Profile, topology: Topology, factors: Factors) -> float:
    """Simulated seconds from step to step."""
    costs = with_costs(profile, plan, factors)
    cost = of_plan(costs, plan, with_speeds_of(topology, factors), runtime=FREE)
    return update_s(plan, cost)[1]


def loads(plan: Plan, factors: Factors) -> list[float]:
    """Seconds of work of each rank per update."""
    found = [0.0] * plan.placement.num_ranks
    for spec, ranks in zip(plan.partition.stages, plan.placement.ranks, strict=True):
        each_s = sum(factors.costs[layer] for layer in spec.layers)
        for rank, count in zip(ranks, _counts(plan, len(ranks)), strict=True):
            found[rank] += each_s * count * factors.slowness[rank]
    return found


def others(plan: Plan, profile: Profile, factors: Factors) -> list[Plan]:
    """The plans to compare with one that runs: with the best cut, and where copies may differ with the best shares."""
    found = [_with_best_cut(plan, profile, factors)]
    if _may_have_shares(plan):
        shared = _with_best_shares(plan, factors)
        found += [shared, _with_best_cut(shared, profile, factors)]
    return [other for other in found if _shape(other) != _shape(plan)]


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.shares, plan.partition


def _counts(plan: Plan, num_copies: int) -> Sequence[float]:
    """Micro-batches of each copy of a stage per update."""
    return plan.shares or [plan.num_microbatches / num_copies] * num_copies


def _with_best_cut(plan: Plan, profile: Profile, factors: Factors) -> Plan:
    """The plan whose slowest stage is as fast as possible."""
    costs = spans(factors.costs)
    of_stage = []
    for ranks in plan.placement.ranks:
        waits = [factors.slowness[rank] * count for rank, count in zip(ranks, _counts(plan, len(ranks)), strict=True)]
        of_stage.append(costs * max(waits))
    counts = divide(of_stage)
    assert counts is not None
    stages = []
    for plain, spec in zip(Partition.from_counts(counts).stages, plan.partition.stages, strict=True):
        stages.append(msgspec.structs.replace(spec, layers=plain.layers))
    partition = Partition(tuple(stages))
    return msgspec.structs.replace(plan, partition=partition, frozen=profile.num_frozen(partition))


def _may_have_shares(plan: Plan) -> bool:
    are_alike = plan.data > 1 and all(stage.replicas == 1 for stage in plan.partition.stages)
    return are_alike and plan.shard not in COMING_AND_GOING and find(plan.schedule).is_synchronous


def _with_best_shares(plan: Plan, factors: Factors) -> Plan:
    """The plan whose copies get micro-batches by their speeds, each that of its slowest rank."""
    paces = []
    for copy in range(plan.data):
        work = []
        for spec, ranks in zip(plan.partition.stages, plan.placement.ranks, strict=True):
            each_s = sum(factors.costs[layer] for layer in spec.layers)
            work.append(each_s * factors.slowness[ranks[copy]])
        paces.append(1 / max(work))
    return msgspec.structs.replace(plan, shares=shares_of(paces, plan.num_microbatches))
