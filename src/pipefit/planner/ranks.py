"""The ranks of a candidate: which stages are theirs, how fast they are, what memory they have and what they hold."""

from __future__ import annotations

from pipefit.planner.held import Holding, held, held_replicated, replays
from pipefit.planner.space import Config, Ground
from pipefit.schedules import find, placement_of
from pipefit.spec import Placement

__all__ = ["Both", "holdings_of", "limits_of", "mixed", "placement_for", "positions", "replayed", "slowness_of"]

Both = tuple[tuple[Holding, ...], tuple[Holding, ...]]
"""What each rank holds without and with recompute."""


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


def holdings_of(config: Config) -> tuple[Both, int]:
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


def replayed(config: Config) -> tuple[float, ...]:
    """Of each stage the share of its forwards that are replayed: none where the backward follows at once."""
    if config.replicas:
        return (1.0,) * len(config.replicas)
    return replays(config.schedule, config.depth, config.per_pipeline, config.chunks)


def mixed(both: Both, recomputed: set[int]) -> tuple[Holding, ...]:
    """What each rank holds when some of them recompute."""
    return tuple(
        replayed if rank in recomputed else plain for rank, (plain, replayed) in enumerate(zip(*both, strict=True))
    )


def limits_of(ground: Ground, config: Config) -> tuple[float, ...]:
    """Memory of each rank of one pipeline: the least among its copies."""
    topology = ground.ranks(config.tensor)
    if not topology.devices or config.replicas:
        return (min(device.memory_bytes for device in topology.devices or (topology.device,)),) * config.depth
    return tuple(
        min(topology.device_of(position + config.depth * copy).memory_bytes for copy in range(config.data))
        for position in range(config.depth)
    )


def slowness_of(ground: Ground, config: Config) -> list[float]:
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
