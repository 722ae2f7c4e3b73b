"""The devices of a candidate's ranks: which stages are theirs, how fast they are, what memory they have."""

from __future__ import annotations

from pipefit.cost import speeds_of
from pipefit.planner.space import Config, Problem
from pipefit.schedules import find, placement_of
from pipefit.spec import Placement


def placement_for(config: Config) -> Placement:
    """The ranks of each stage as the schedule's own layout numbers them: pipeline by pipeline."""
    copies = config.replicas or (config.data,)
    return Placement(placement_of(config.depth, config.chunks, _layout(config), copies))


def positions(config: Config) -> tuple[int, ...]:
    """The rank, within one pipeline, of each stage."""
    return tuple(ranks[0] for ranks in placement_of(config.depth, config.chunks, _layout(config)))


def _layout(config: Config) -> str:
    return "loop" if config.depth == 1 else find(config.schedule).layout


def limits_of(problem: Problem, config: Config) -> tuple[float, ...]:
    """Memory of each rank of one pipeline: the least among its copies, and no more than the cap."""
    if problem.cap is not None:
        return (problem.cap.device_bytes,) * problem.cap.num_ranks
    topology = problem.ranks(config.tensor)
    if not topology.devices or config.replicas:
        return (min(device.memory_bytes for device in topology.devices or (topology.device,)),) * config.depth
    return tuple(
        min(topology.device_of(position + config.depth * copy).memory_bytes for copy in range(config.data))
        for position in range(config.depth)
    )


def slowness_of(problem: Problem, config: Config) -> list[float]:
    """Of each rank of one pipeline, over the device the profile is for."""
    speeds = speeds_of(problem.ranks(config.tensor))
    if not speeds:
        return [1.0] * config.depth
    return [
        1 / min(speeds[position + config.depth * copy] for copy in range(config.data))
        for position in range(config.depth)
    ]
