"""Judging one candidate: where it is cut, what its ranks hold, how long its step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipefit.cost import FREE, CostModel, of_plan
from pipefit.errors import ScheduleError
from pipefit.planner.closed_forms import estimate_s
from pipefit.planner.cut import Within, cut
from pipefit.planner.held import peaks
from pipefit.planner.ranks import Both, holdings_of, limits_of, mixed, placement_for, positions
from pipefit.planner.space import Config, Ground
from pipefit.spec import Partition, Plan, StageSpec
from pipefit.units import format_bytes

__all__ = ["Judged", "costs_of", "judge", "plan_of"]


@dataclass(frozen=True)
class Judged:
    """A candidate after a closer look.

    Attributes:
        config: the candidate.
        partition: its stages; None: it has no meaning, see `why`.
        peak_bytes: of each rank of one pipeline (of all ranks where stages are replicated unevenly).
        limit_bytes: of the same ranks.
        step_s: estimated seconds per weight update.
        fits: whether every rank has the memory.
        why: why it does not.
    """

    config: Config
    partition: Partition | None
    peak_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    step_s: float
    fits: bool
    why: str = ""

    @property
    def overflow(self) -> float:
        """The worst of needed over available bytes."""
        return max((need / limit for need, limit in zip(self.peak_bytes, self.limit_bytes, strict=True)), default=1e9)


def judge(ground: Ground, config: Config) -> Judged:
    """Cuts the model for a candidate and counts time and memory."""
    return ground.once(("judge", config), lambda: _judge(ground, config))


def _judge(ground: Ground, config: Config) -> Judged:
    limits = limits_of(ground, config)
    try:
        holdings, further = holdings_of(config)
    except ScheduleError as problem:
        return Judged(config, None, (), (), float("inf"), False, str(problem))
    recomputed = set(range(config.num_stages)) if config.recompute == "all" else set()
    partition = cut(ground, config, recomputed)
    found = _weigh(ground, config, partition, recomputed, holdings, further, limits)
    if found.fits or config.layers or config.replicas:
        return found
    if config.recompute == "some":
        # A replay on the ranks that lack memory makes them slower, so they get fewer layers, so look again.
        for _ in range(3):
            short = {r for r, (need, limit) in enumerate(zip(found.peak_bytes, limits, strict=True)) if need > limit}
            if short <= recomputed:
                break
            recomputed = recomputed | short
            partition = cut(ground, config, recomputed)
            found = _weigh(ground, config, partition, recomputed, holdings, further, limits)
            if found.fits:
                return found
    if config.chunks == 1 and config.partitioner in ("minmax", "links"):
        every = set(range(config.num_stages))
        for again in (recomputed, every) if config.recompute == "some" and recomputed != every else (recomputed,):
            tight = cut(ground, config, again, Within(mixed(holdings, again), further, limits))
            if tight is not None:
                return _weigh(ground, config, tight, again, holdings, further, limits)
    return found


def costs_of(ground: Ground, config: Config, partition: Partition) -> tuple[CostModel, CostModel]:
    """Costs for time, and costs for memory: with scatter/gather a message is 1/t of the value that is held."""
    profile = ground.at(config.microbatch_size, config.tensor)
    cost = of_plan(
        profile,
        plan_of(ground, config, partition, tensor=1),
        ground.ranks(config.tensor),
        state_per_weight=ground.state,
        runtime=FREE,
    )
    if config.tensor == 1:
        return cost, cost
    link = ground.topology.level_between(0, config.tensor - 1)
    per_byte = (config.tensor - 1) / config.tensor / link.bandwidth_bytes_per_s
    forward, backward = list(cost.forward_s), list(cost.backward_input_s)
    for stage in range(1, cost.num_stages):
        forward[stage] += cost.act_bytes[stage - 1] * per_byte
        backward[stage - 1] += cost.grad_bytes[stage - 1] * per_byte
    timing = replace(
        cost,
        forward_s=tuple(forward),
        backward_input_s=tuple(backward),
        recompute_s=cost.forward_s,
        act_bytes=tuple(size / config.tensor for size in cost.act_bytes),
        grad_bytes=tuple(size / config.tensor for size in cost.grad_bytes),
    )
    return timing, cost


def plan_of(
    ground: Ground, config: Config, partition: Partition, method: str = "auto", tensor: int | None = None
) -> Plan:
    """The plan of a candidate, still without a prediction.

    Args:
        ground: what it is judged on.
        config: the candidate.
        partition: its stages.
        method: by which it was found.
        tensor: width to note; None: the candidate's.
    """
    width = tensor or config.tensor
    stages = tuple(StageSpec(stage.layers, stage.replicas, width, stage.recompute) for stage in partition.stages)
    return Plan(
        Partition(stages),
        placement_for(config),
        config.schedule,
        config.num_microbatches,
        config.microbatch_size,
        config.chunks,
        data=config.data,
        sharded_optimizer=config.sharded,
        model=ground.profile.model,
        method=method,
    )


def _weigh(
    ground: Ground,
    config: Config,
    partition: Partition | None,
    recomputed: set[int],
    both: Both,
    further: int,
    limits: tuple[float, ...],
) -> Judged:
    assert partition is not None
    timing, sizes = costs_of(ground, config, partition)
    holdings = mixed(both, recomputed)
    owner = positions(config)
    stages_of = [tuple(s for s, rank in enumerate(owner) if rank == own) for own in range(config.depth)]
    needed = tuple(peaks(holdings, sizes, stages_of, further))
    worst = max(range(len(needed)), key=lambda rank: needed[rank] / limits[rank])
    fits = needed[worst] <= limits[worst]
    why = ""
    if not fits:
        where = f"stage {worst}" if config.chunks == 1 else f"rank {worst}"
        why = f"{where} needs {format_bytes(needed[worst])} of {format_bytes(limits[worst])}"
    return Judged(config, partition, needed, limits, estimate_s(ground, config, partition, timing), fits, why)
