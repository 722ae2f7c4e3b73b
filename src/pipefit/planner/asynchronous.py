"""PipeDream's plan, and its unequal replicas as candidates for synchronous training."""

from __future__ import annotations

import math
from dataclasses import replace

from pipefit.errors import InfeasibleError, PlanError
from pipefit.partition import PipeDreamResult, pipedream
from pipefit.planner.space import Config, Problem, Space
from pipefit.schedules import placement_of
from pipefit.spec import Candidate, Partition, Placement, Plan, Prediction, Profile, StageSpec, Topology


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
        InfeasibleError: nothing fits.
    """
    state = 1.0 if state_per_weight is None else state_per_weight
    found = pipedream(profile, topology, cost=cost, straight=straight, state_factor=1.0 + state)
    if found.partition is None:
        raise InfeasibleError(f"{profile.model}: {found.why}")
    stages = found.partition.stages
    is_single = len(stages) == 1
    counts = tuple(stage.replicas for stage in stages)
    num_workers = sum(counts)
    specs = stages if not is_single else (StageSpec(stages[0].layers),)
    placement = placement_of(num_workers, 1, "replicas") if is_single else placement_of(len(stages), 1, "loop", counts)
    per_update = num_workers if is_single else 1
    update_s, rate = found.time_s * per_update, profile.microbatch_size / found.time_s
    partition = Partition(specs)
    peaks = {rank: size for ranks, size in zip(placement, found.memory_bytes, strict=True) for rank in ranks}
    peak_bytes, ahead = tuple(peaks[rank] for rank in sorted(peaks)), found.speedup_over_data_parallel
    return Plan(
        partition,
        Placement(placement),
        "data-parallel" if is_single else "pipedream",
        per_update,
        profile.microbatch_size,
        data=num_workers if is_single else 1,
        frozen=profile.num_frozen(partition),
        model=profile.model,
        method="pipedream",
        prediction=Prediction(update_s, update_s, found.time_s, rate, peak_bytes, ahead),
        candidates=_candidates(profile, found),
    )


def _candidates(profile: Profile, found: PipeDreamResult) -> tuple[Candidate, ...]:
    def lost(summary: str, family: str, seconds: float, unfit: str = "nothing fits", fits: bool = True) -> Candidate:
        if not math.isfinite(seconds):
            return Candidate(summary, family, None, None, None, unfit)
        why = f"{seconds / found.time_s:.2f} times the time per mini-batch"
        if seconds <= found.time_s:
            ahead = 1 - seconds / found.time_s
            why = f"{ahead:.1%} faster, within the margin that data parallelism is preferred by"
        return Candidate(summary, family, seconds, profile.microbatch_size / seconds, None, why if fits else unfit)

    winner = f"{found.configuration} ({found.shape}, {found.convention})"
    lines = [Candidate(winner, found.shape, found.time_s, profile.microbatch_size / found.time_s, None)]
    for shape, seconds in (("flat", found.flat_s), ("hierarchical", found.hierarchical_s)):
        if seconds is not None and found.shape != shape:
            lines.append(lost(f"best of the {shape} search", shape, seconds))
    if found.shape != "data parallel":
        unfit, plain_s = "does not fit the memory of a device", found.data_parallel_s
        lines.append(lost("every device all layers", "data parallel", plain_s, unfit, found.data_parallel_fits))
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
        stages = found.partition.stages if found.partition else ()
        counts = tuple(stage.replicas for stage in stages)
        if len(set(counts)) > 1 and sum(counts) == problem.topology.num_devices and count >= max(counts):
            layers = tuple(stage.layers for stage in stages)
            made = Config("1f1b", 1, len(stages), 1, 1, size, count, replicas=counts, layers=layers)
            result += [replace(made, recompute=mode) for mode in space.recompute if mode != "some"]
    return result
