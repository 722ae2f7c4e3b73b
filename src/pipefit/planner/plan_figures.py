"""Figures of a plan next to its speed: how long its devices are idle, and how many bytes travel."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cost import FREE, CostModel, of_plan
from pipefit.planner.computed_profile import profile_at
from pipefit.planner.holdings import collectives_of, replayed
from pipefit.planner.space import Config
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.plan import COMING_AND_GOING


def replays_of(plan: Plan, inside: float = 0.0, attention: float = 0.0) -> list[float]:
    """The share of each stage's forwards that is replayed.

    Of whole stages, those whose backward follows at once are not replayed.

    Args:
        plan: with the recomputation of each stage.
        inside: counted of a stage whose backward replays its layers.
        attention: counted of a stage whose backward replays attention only.
    """
    stages = plan.partition.stages
    whole = (0.0,) * len(stages)
    if any(stage.is_replayed for stage in stages):
        whole = replayed(_config_of(plan))
    found = [0.0] * len(stages)
    for index, stage in enumerate(stages[plan.frozen :], plan.frozen):
        shares = {"none": 0.0, "stage": whole[index], "layer": inside, "selective": attention}
        found[index] = shares[stage.replays]
    return found


def _config_of(plan: Plan) -> Config:
    """The order of a plan's program, as the planner counts it."""
    stages = plan.partition.stages
    chunks = plan.num_chunks
    depth = len(stages) // chunks
    size = plan.microbatch_size
    count = plan.num_microbatches
    replicas = tuple(stage.replicas for stage in stages)
    if max(replicas) == 1:
        replicas = ()
    return Config(plan.schedule, plan.data, depth, 1, chunks, size, count, shard=plan.shard, replicas=replicas)


def at_size_of(plan: Plan, profile: Profile) -> Profile:
    """The profile at the micro-batch size of a plan, where the plan has one."""
    if plan.microbatch_size:
        return profile.at(plan.microbatch_size)
    return profile


def plan_costs(plan: Plan, profile: Profile, topology: Topology) -> CostModel:
    """Costs of a plan's stages by the profile at its micro-batch size and tensor width; the executor costs nothing."""
    size = plan.microbatch_size or profile.microbatch_size
    return of_plan(profile_at(profile, size, plan.tensor, topology), plan, topology, runtime=FREE)


def idle_share(plan: Plan, profile: Profile, topology: Topology, update_s: float) -> float:
    """The share of the devices' time in which they do no work of an update: they wait for data, copies or others.

    Work is forwards, backwards, replays, loss and optimizer, and inside a layer the sums of tensor parallelism.

    Args:
        plan: with its stages and their ranks.
        profile: of the model.
        topology: of the machine.
        update_s: seconds from update to update.
    """
    cost = plan_costs(plan, profile, topology)
    again = replays_of(plan)
    busy_s = 0.0
    for stage, ranks in enumerate(plan.placement.ranks):
        each_s = cost.forward_s[stage] + cost.backward_input_s[stage] + cost.backward_weight_s[stage]
        each_s += again[stage] * cost.recompute_s[stage]
        if stage == len(again) - 1:
            each_s += cost.loss_s
        counts: Sequence[float] = plan.shares or [plan.num_microbatches / len(ranks)] * len(ranks)
        for rank, count in zip(ranks, counts, strict=True):
            speed = 1.0
            if cost.speed:
                speed = cost.speed[rank]
            busy_s += (each_s * count + cost.step_s[stage]) / speed
    if update_s:
        return max(1 - busy_s / (update_s * plan.placement.num_ranks), 0.0)
    return 0.0


def sent_bytes(plan: Plan, profile: Profile, topology: Topology) -> float:
    """Bytes that travel per sample, by all devices together.

    Activations and their gradients cross every border between ranks. The gradients of a stage with d copies are summed
    by a ring, 2(d−1)·bytes per update; what copies share is gathered, or summed, several times. With tensor width t a
    message is gathered again, t·bytes in all, and a block makes two sums in its forward and two in its backward,
    2(t−1)·bytes each.

    Args:
        plan: with its stages and their ranks.
        profile: of the model.
        topology: of the machine.
    """
    cost = plan_costs(plan, profile, topology)
    again = replays_of(plan, inside=1.0)
    moved = [(1.0, 1.0)] * len(again)
    if plan.shard in COMING_AND_GOING:
        moved = collectives_of(_config_of(plan))
    width = plan.tensor
    total = 0.0
    size = plan.microbatch_size or profile.microbatch_size
    ranks = plan.placement.ranks
    figures = profile.at(size)
    blocks = range(1, len(figures) - 1)
    for stage, spec in enumerate(plan.partition.stages):
        if stage + 1 < len(ranks) and ranks[stage] != ranks[stage + 1]:
            crossing = cost.act_bytes[stage]
            if stage >= plan.frozen:
                crossing += cost.grad_bytes[stage]
            total += width * crossing
        sums = 2 * (4 + 2 * again[stage]) * (width - 1)
        for index in spec.layers:
            if index in blocks:
                total += sums * figures.layers[index].output_bytes
        copies = len(ranks[stage])
        # Without a flush, replicas sum their gradients once each of them has had a mini-batch.
        per_update = max(plan.num_microbatches, copies)
        gathers, scatters = moved[stage]
        total += (copies - 1) * width * (gathers + scatters) * cost.wgrad_bytes[stage] / per_update
    return total / size
