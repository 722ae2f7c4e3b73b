"""Judging one candidate: where it is cut, what its ranks hold, how long its step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pipefit.cost import CostModel
from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.ir.values import Value
from pipefit.partition import gpipe, uniform
from pipefit.planner.divide import divide, spans
from pipefit.planner.held import Holding, held, held_replicated, holds_all, peaks
from pipefit.planner.space import Config, Ground
from pipefit.schedules import find, placement_of
from pipefit.spec import Partition, Placement, Profile, StageSpec
from pipefit.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "Judged",
    "costs_of",
    "estimate_s",
    "judge",
    "least_bytes",
    "placement_for",
    "positions",
    "quick_bytes",
    "quick_s",
    "reduce_s",
]


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


def placement_for(config: Config) -> Placement:
    """The ranks of each stage as the schedule's own layout numbers them: pipeline by pipeline."""
    if config.depth == 1:
        return Placement(placement_of(config.data, 1, "replicas"))
    layout = find(config.schedule).layout
    return Placement(placement_of(config.depth, config.chunks, layout, config.replicas or (config.data,)))


def positions(config: Config) -> tuple[int, ...]:
    """The rank, within one pipeline, of each stage."""
    layout = "loop" if config.depth == 1 else find(config.schedule).layout
    return tuple(ranks[0] for ranks in placement_of(config.depth, config.chunks, layout))


# --------------------------------------------------------------------------------------------- before a cut is chosen


def quick_s(ground: Ground, config: Config) -> float:
    """Seconds per update if the layers could be cut anywhere: a lower bound, roughly, for ranking."""
    total, largest, cut = ground.once(
        ("quick", config.microbatch_size, config.tensor),
        lambda: _totals(ground.at(config.microbatch_size, config.tensor)),
    )
    factor = 1 + (total[1] / total[0] if config.recompute == "all" and total[0] else 0.0)
    work = max(total[0] / config.depth, largest) * factor
    if config.replicas:
        work = total[0] / sum(config.replicas) * factor
    topology = ground.ranks(config.tensor)
    message_s = 0.0
    if config.depth > 1:
        link = topology.level_between(0, 1)
        message_s = cut / config.tensor / link.bandwidth_bytes_per_s + link.latency_s
    others = work * (config.depth - 1)
    reduce_s = _reduce_bound_s(ground, config, ground.weight_bytes / config.depth / config.tensor)
    return _step_s(config, work, others, message_s) + reduce_s


def _totals(profile: Profile) -> tuple[tuple[float, float], float, float]:
    total = sum(layer.total_s for layer in profile.layers) + profile.loss_s
    forward = sum(layer.forward_s for layer in profile.layers)
    cuts = sorted(profile.cut_bytes)
    return (total, forward), max(layer.total_s for layer in profile.layers), cuts[0] if cuts else 0.0


def _reduce_bound_s(ground: Ground, config: Config, weight_bytes: float) -> float:
    if config.data < 2:
        return 0.0
    topology = ground.ranks(config.tensor)
    link = topology.level_between(0, config.depth)
    return 2 * (config.data - 1) / config.data * weight_bytes / link.bandwidth_bytes_per_s


def quick_bytes(ground: Ground, config: Config) -> float:
    """Bytes that some rank needs at least, however the layers are cut."""
    profile = ground.at(config.microbatch_size, config.tensor)
    weights, saved, cut = ground.once(
        ("bytes", config.microbatch_size, config.tensor),
        lambda: (
            sum(x.weight_bytes for x in profile.layers),
            sum(x.saved_bytes for x in profile.layers),
            min(profile.cut_bytes, default=0.0),
        ),
    )
    state = ground.state / (config.data if config.sharded else 1)
    versions = 2 if config.schedule == "pipedream-2bw" else 1
    kept = saved if config.recompute == "none" else 0.0
    if config.depth > 1 and not config.replicas and holds_all(config.schedule, config.chunks):
        # At least what enters each of a rank's stages, of every micro-batch.
        kept = max(kept, cut * config.num_stages) * config.per_pipeline
    return float((weights * (1 + versions + state) + kept) / config.depth)


# ---------------------------------------------------------------------------------------------------- with its stages


def judge(ground: Ground, config: Config) -> Judged:
    """Cuts the model for a candidate and counts time and memory."""
    return ground.once(("judge", config), lambda: _judge(ground, config))


def _judge(ground: Ground, config: Config) -> Judged:
    limits = _limits(ground, config)
    try:
        holdings, further = _holdings(config)
    except ScheduleError as problem:
        return Judged(config, None, (), (), float("inf"), False, str(problem))
    tries = [set(range(config.num_stages)) if config.recompute == "all" else set()]
    partition = _cut(ground, config, tries[0], None, limits)
    recomputed = tries[0]
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
            partition = _cut(ground, config, recomputed, None, limits)
            found = _weigh(ground, config, partition, recomputed, holdings, further, limits)
            if found.fits:
                return found
    if config.chunks == 1 and config.partitioner in ("minmax", "links"):
        mixed = tuple(_pick(holdings, rank, rank in recomputed) for rank in range(config.depth))
        tight = _cut(ground, config, recomputed, (mixed, further), limits)
        if tight is not None:
            return _weigh(ground, config, tight, recomputed, holdings, further, limits)
    return found


Both = tuple[tuple[Holding, ...], tuple[Holding, ...]]


def _holdings(config: Config) -> tuple[Both, int]:
    """What ranks hold without and with recompute, and the micro-batches beyond those counted."""
    if config.replicas:
        found, more = held_replicated(
            config.schedule, config.replicas, config.num_microbatches, config.recompute == "all"
        )
        return (found, found), more
    name, count = config.schedule, config.per_pipeline
    plain, counted = held(name, config.depth, count, config.chunks, config.recompute == "all")
    replayed = held(name, config.depth, count, config.chunks, True)[0] if config.recompute == "some" else plain
    return (plain, replayed), count - counted


def _pick(both: Both, rank: int, recomputed: bool) -> Holding:
    return both[1 if recomputed else 0][rank]


def _limits(ground: Ground, config: Config) -> tuple[float, ...]:
    """Memory of each rank of one pipeline: the least among its copies."""
    topology = ground.ranks(config.tensor)
    if not topology.devices or config.replicas:
        return (min(device.memory_bytes for device in topology.devices or (topology.device,)),) * config.depth
    return tuple(
        min(topology.device_of(position + config.depth * copy).memory_bytes for copy in range(config.data))
        for position in range(config.depth)
    )


def _slowness(ground: Ground, config: Config) -> list[float]:
    """Of each rank of one pipeline, over the device the profile is for."""
    topology = ground.ranks(config.tensor)
    if not topology.devices or not all(device.flops for device in topology.devices):
        return [1.0] * config.depth
    reference = topology.device if topology.device.flops else topology.devices[0]
    usable = reference.flops * reference.efficiency
    speeds = [device.flops * device.efficiency / usable for device in topology.devices]
    return [
        1 / min(speeds[position + config.depth * copy] for copy in range(config.data))
        for position in range(config.depth)
    ]


def _cut(
    ground: Ground,
    config: Config,
    recomputed: set[int],
    held_by: tuple[tuple[Holding, ...], int] | None,
    limits: tuple[float, ...],
) -> Partition | None:
    """The stages; None when no cut fits the memory."""
    if config.layers:
        stages = zip(config.layers, config.replicas or (1,) * len(config.layers), strict=True)
        everywhere = config.recompute == "all"
        return Partition(tuple(StageSpec(layers, count, recompute=everywhere) for layers, count in stages))
    profile = ground.at(config.microbatch_size, config.tensor)
    if config.partitioner in ("gpipe", "uniform"):
        found = (gpipe if config.partitioner == "gpipe" else uniform)(profile, config.num_stages)
        counts: list[int] | None = [len(stage.layers) for stage in found.stages]
    else:
        slow = _slowness(ground, config)
        # Only what decides the cut belongs to the key: many candidates share one.
        key = ("cut", config.microbatch_size, config.tensor, config.num_stages, tuple(slow), tuple(sorted(recomputed)))
        where = config.depth if config.partitioner == "links" else 0
        if held_by is None:
            counts = ground.once(
                (key, config.partitioner, where), lambda: divide(_time_spans(ground, config, recomputed, slow))
            )
        else:
            times = _time_spans(ground, config, recomputed, slow)
            counts = divide(_within_memory(ground, config, times, held_by, limits))
    if counts is None:
        return None
    plain = Partition.from_counts(counts)
    return Partition(
        tuple(
            StageSpec(stage.layers, 1, config.tensor, recompute=index in recomputed)
            for index, stage in enumerate(plain.stages)
        )
    )


def _time_spans(ground: Ground, config: Config, recomputed: set[int], slow: list[float]) -> list[Array]:
    profile = ground.at(config.microbatch_size, config.tensor)

    def make() -> tuple[Array, Array]:
        times = [layer.total_s for layer in profile.layers]
        times[-1] += profile.loss_s
        return spans(times), spans([layer.forward_s for layer in profile.layers])

    whole, forward = ground.once(("spans", config.microbatch_size, config.tensor), make)
    replayed = whole + forward
    kinds: dict[tuple[float, bool], Array] = {}
    links = _link_spans(ground, config) if config.partitioner == "links" else 0.0
    result = []
    owner = positions(config)
    for stage in range(config.num_stages):
        kind = slow[owner[stage]], stage in recomputed
        if kind not in kinds:
            kinds[kind] = (replayed if kind[1] else whole) * kind[0] + links
        result.append(kinds[kind])
    return result


def _link_spans(ground: Ground, config: Config) -> Array:
    """What a stage would pay for its messages, in and out, both ways, if none overlapped with its work."""
    import numpy as np

    profile = ground.at(config.microbatch_size, config.tensor)
    ranks = placement_for(config).ranks
    topology = ground.ranks(config.tensor)
    joints = [topology.level_between(a[0], b[0]) for a, b in pairwise(ranks)]
    bandwidth = min(level.bandwidth_bytes_per_s for level in joints)
    latency = max(level.latency_s for level in joints)
    cost = [0.0, *(2 * (size / config.tensor / bandwidth + latency) for size in profile.cut_bytes), 0.0]
    both: Array = np.array(cost)[:, None] + np.array(cost)[None, :]
    return both


def least_bytes(ground: Ground, config: Config) -> float:
    """The memory with which a candidate of one stage per rank fits, cut for memory alone."""
    both, further = _holdings(config)
    holdings = both[0] if config.recompute == "none" else both[1]
    needs = _needs(ground, config, holdings, further)
    counts = divide(needs)
    if counts is None:
        return float("inf")
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return max(float(need[end - count, end]) for need, end, count in zip(needs, ends, counts, strict=True))


def _within_memory(
    ground: Ground,
    config: Config,
    times: list[Array],
    held_by: tuple[tuple[Holding, ...], int],
    limits: tuple[float, ...],
) -> list[Array]:
    """The times, infinite where a stage would not fit its rank. One stage per rank."""
    import numpy as np

    needs = _needs(ground, config, *held_by)
    return [np.where(need <= limit, time, np.inf) for need, limit, time in zip(needs, limits, times, strict=True)]


def _needs(ground: Ground, config: Config, holdings: tuple[Holding, ...], further: int) -> list[Array]:
    """For each rank the array [a, b]: its peak bytes if its stage held the layers a…b−1."""
    import numpy as np

    profile = ground.at(config.microbatch_size, config.tensor)
    sums = {name: spans([getattr(layer, name) for layer in profile.layers]) for name in ("weight_bytes", "saved_bytes")}
    cuts = np.array([0.0, *profile.cut_bytes, profile.layers[-1].output_bytes])
    weights, saved = sums["weight_bytes"], sums["saved_bytes"]
    entering, leaving = cuts[:, None] + 0 * weights, cuts[None, :] + 0 * weights
    state = ground.state / (config.data if config.sharded else 1)
    result = []
    for stage, holding in enumerate(holdings):
        sizes = {"weights": weights, "wgrad": weights, "saved": saved, "half": leaving}
        need = 0 * weights
        for row in holding.rows + further * holding.growth:
            total = state * weights
            for count, (kind, owner) in zip(row, holding.keys, strict=True):
                if kind in ("act", "grad"):
                    total = total + count * (leaving if owner == stage else entering)
                elif kind in sizes:
                    total = total + count * sizes[kind]
            need = np.maximum(need, total)
        result.append(need)
    return result


def costs_of(ground: Ground, config: Config, partition: Partition) -> tuple[CostModel, CostModel]:
    """Costs for time, and costs for memory: with scatter/gather a message is 1/t of the value that is held."""
    profile = ground.at(config.microbatch_size, config.tensor)
    shards = config.data if config.sharded else 1
    options: dict[str, Any] = dict(ground.options)
    step_s = ground.profile.optimizer_s / ground.weight_bytes if ground.weight_bytes else 0.0
    plain = Partition(tuple(StageSpec(stage.layers, recompute=stage.recompute) for stage in partition.stages))
    cost = CostModel.from_profile(
        profile,
        plain,
        ground.ranks(config.tensor),
        optimizer_bytes_per_weight_byte=ground.state / shards,
        step_s_per_weight_byte=step_s / shards,
        loss_s=profile.loss_s,
        **options,
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
    holdings = tuple(_pick(both, rank, rank in recomputed) for rank in range(config.depth))
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


def estimate_s(ground: Ground, config: Config, partition: Partition, cost: CostModel) -> float:
    """Seconds per update by the closed forms, for stages that differ."""
    work = [0.0] * config.depth
    owner = positions(config)
    slow = _slowness(ground, config) if not config.replicas else [1.0] * config.depth
    for stage, spec in enumerate(partition.stages):
        rank = owner[stage]
        seconds = cost.forward_s[stage] + cost.backward_input_s[stage] + cost.backward_weight_s[stage]
        seconds += cost.recompute_s[stage] if spec.recompute else 0.0
        seconds += cost.loss_s if stage == len(partition.stages) - 1 else 0.0
        count = 3 if spec.recompute else 2
        own = seconds * slow[rank] + count * (cost.overhead_s + 2 * cost.post_s)
        work[rank] += own / (config.replicas[rank] if config.replicas else 1)
    worst = max(work)
    message_s = 0.0
    placement = placement_for(config).ranks
    for stage in range(len(partition.stages) - 1):
        link = cost.link(placement[stage][0], placement[stage + 1][0])
        message_s = max(message_s, link[1] + cost.size_bytes(Value("act", stage, 0)) / link[0])
    tail = 0.0
    for stage, ranks in enumerate(placement):
        tail = max(tail, reduce_s(cost, stage, ranks) + cost.step_s[stage])
    return _step_s(config, worst, sum(work) - worst, message_s) + tail


def reduce_s(cost: CostModel, stage: int, ranks: tuple[int, ...]) -> float:
    """Seconds of the reduction of a stage's gradients over its copies."""
    return cost.reduce_s(Instruction(Op.REDUCE, stage, version=0, kind="wgrad"), list(ranks))


def _step_s(config: Config, worst: float, others: float, message_s: float) -> float:
    """The schedule's closed form with the slowest rank's work in place of f+b, and the others' as its fill."""
    m, p, v = config.per_pipeline, config.depth, config.chunks
    if p == 1:
        return m * worst
    if config.schedule.startswith("pipedream"):
        return m * worst + 2 * message_s * m * (p - 1) / p
    if config.schedule in ("interleaved", "breadth-first"):
        hops = p * v - 1 if config.schedule == "interleaved" else p - 1
        return m * worst + others / v + 2 * hops * message_s
    if config.schedule == "gpipe":
        return m * worst + others + 2 * (p - 1) * message_s
    return m * worst + others + 2 * message_s * ((p - 1) * m / p + p - 2)
