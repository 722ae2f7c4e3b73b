"""PipeDream's plan, and its unequal replicas as candidates for synchronous training."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from pipefit.cost import speeds_of
from pipefit.errors import InfeasibleError, PlanError
from pipefit.partition import PipeDreamResult, pipedream
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.space import Config, Problem, Space
from pipefit.spec import Candidate, Partition, Placement, Plan, Prediction, Profile, StageSpec, Topology
from pipefit.units import format_bytes


def plan_pipedream(
    profile: Profile,
    topology: Topology,
    *,
    cost: str = "ring",
    straight: bool = False,
    state_per_weight: float | None = None,
) -> Plan:
    """PipeDream's plan: stages with replicas, a weight update per mini-batch, weight stashing.

    Times are those of the partitioner's cost convention, per mini-batch of the profile's size. `state_per_weight` is
    for the optimizer only; gradients take one more byte per weight byte.

    Raises:
        PlanError: devices differ in speed, for which the partitioner has no rule.
        InfeasibleError: nothing fits.
    """
    speeds = speeds_of(topology.for_elements(profile.element_bytes))
    if len(set(speeds)) > 1:
        raise PlanError(
            "method pipedream: expected devices that are equally fast, got some that are "
            f"{max(speeds) / min(speeds):.3g} × as fast as others; use method auto, which plans by their speeds"
        )
    if state_per_weight is None:
        state_per_weight = 1.0
    found = pipedream(profile, topology, cost=cost, straight=straight, state_factor=1.0 + state_per_weight)
    if found.partition is None:
        raise InfeasibleError(f"{profile.model}: {found.why}")
    partition = found.partition
    # Replicas are on consecutive ranks, so that those of a stage which fits into a server are in one: the search
    # assumes it.
    placement = []
    peaks: list[float] = []
    for stage, size in zip(partition.stages, found.memory_bytes, strict=True):
        first = len(peaks)
        peaks += [size] * stage.replicas
        placement.append(tuple(range(first, len(peaks))))
    schedule = "pipedream"
    per_update = 1
    if len(placement) == 1:
        schedule = "data-parallel"
        per_update = len(peaks)
        partition = Partition((StageSpec(partition.stages[0].layers),))
    update_s = found.time_s * per_update
    rate = profile.microbatch_size / found.time_s
    ahead = None
    if found.data_parallel_fits:
        ahead = found.speedup_over_data_parallel
    made = Plan(
        partition,
        Placement(tuple(placement)),
        schedule,
        per_update,
        profile.microbatch_size,
        data=per_update,
        frozen=profile.num_frozen(partition),
        model=profile.model,
        method="pipedream",
        prediction=Prediction(update_s, update_s, found.time_s, rate, tuple(peaks), ahead),
    )
    return msgspec.structs.replace(made, candidates=_candidates(made, profile, topology, found))


def _candidates(made: Plan, profile: Profile, topology: Topology, found: PipeDreamResult) -> tuple[Candidate, ...]:
    """The winner, and what else the searches found; data parallelism whether it fits or not."""

    def lost(summary: str, family: str, seconds: float, unfit: str = "", sent: float | None = None) -> Candidate:
        if unfit or not math.isfinite(seconds):
            return Candidate(summary, family, None, None, None, unfit or "nothing fits", sent_bytes=sent)
        rate = profile.microbatch_size / seconds
        slower = 1 - found.time_s / seconds
        why = f"{slower:.1%} slower: estimated {rate:.4g} samples/s"
        if slower <= 0:
            why = f"{-slower:.1%} faster, within the margin that data parallelism is preferred by"
        return Candidate(summary, family, seconds, rate, None, why, "estimated", slower, sent_bytes=sent)

    assert made.prediction is not None
    lines = [
        Candidate(
            f"replicas {found.configuration} ({found.shape}, costs by {found.convention})",
            found.shape,
            found.time_s,
            made.prediction.throughput,
            max(made.prediction.peak_bytes),
            basis="estimated",
            slower=0.0,
            idle=idle_share(made, profile, topology, made.prediction.period_s),
            sent_bytes=sent_bytes(made, profile, topology),
        )
    ]
    for shape, seconds in (("flat", found.flat_s), ("hierarchical", found.hierarchical_s)):
        if seconds is not None and found.shape != shape:
            lines.append(lost(f"best of the {shape} search", shape, seconds))
    if found.shape != "data parallel":
        everyone = range(topology.num_devices)
        needs = found.data_parallel_bytes
        limit = min(topology.device_of(rank).memory_bytes for rank in everyone)
        unfit = ""
        if not found.data_parallel_fits:
            unfit = f"a device needs {format_bytes(needs)} of {format_bytes(limit)}"
        every = StageSpec(tuple(range(len(profile))), len(everyone))
        plain = Plan(Partition((every,)), Placement((tuple(everyone),)), "data-parallel", len(everyone))
        sent = sent_bytes(plain, profile, topology)
        lines.append(lost("data parallelism", "data parallel", found.data_parallel_s, unfit, sent))
    if found.partition and max(stage.replicas for stage in found.partition.stages) > 1:
        lines.append(lost("best pipeline without replicas", "straight", found.straight_s))
    return tuple(lines)


def replicated(problem: Problem, space: Space) -> list[Config]:
    """1F1B over PipeDream's stages, where these have different numbers of replicas."""
    if "1f1b" not in space.schedules or problem.topology.num_devices < 3:
        return []
    result = []
    for size, count in space.batches(problem.global_batch):
        try:
            found = pipedream(
                problem.at(size, 1),
                problem.topology,
                weight_versions=False,
                state_factor=1 + problem.state,
                margin=0.0,
            )
        except PlanError:
            continue
        if found.partition is None:
            continue
        stages = found.partition.stages
        counts = tuple(stage.replicas for stage in stages)
        differ = len(set(counts)) > 1
        if differ and sum(counts) == problem.topology.num_devices and count >= max(counts):
            layers = tuple(stage.layers for stage in stages)
            made = Config("1f1b", 1, len(stages), 1, 1, size, count, replicas=counts, layers=layers)
            result += [replace(made, recompute=mode) for mode in space.recompute if mode != "some"]
    return result
