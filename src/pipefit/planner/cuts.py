"""Cuts of a candidate's model: by time only, or by time among those that fit the memory."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipefit.partition import gpipe, uniform
from pipefit.partition.balance import Array, divide, layer_times, message_spans, spans
from pipefit.planner.holdings import Holding, holdings_of
from pipefit.planner.space import Config, Problem, placement_for, positions
from pipefit.spec import Partition, StageSpec


class Within(NamedTuple):
    """The values that each rank holds, and its memory."""

    holdings: tuple[Holding, ...]
    limits: list[float]


def cut(
    problem: Problem,
    config: Config,
    recomputed: set[int],
    within: Within | None = None,
) -> Partition | None:
    """The stages of a candidate; None when no cut fits the memory.

    Args:
        problem: of the search.
        config: the candidate.
        recomputed: the stages that replay their forward.
        within: the memory that a cut must fit; None: only time decides. One stage per rank, then.
    """
    if config.layers:
        stages = zip(config.layers, config.replicas or (1,) * len(config.layers), strict=True)
        everywhere = config.recompute == "all"
        return Partition(tuple(StageSpec(layers, count, recompute=everywhere) for layers, count in stages))
    profile = problem.at(config.microbatch_size, config.tensor)
    if config.partitioner in ("gpipe", "uniform"):
        found = (gpipe if config.partitioner == "gpipe" else uniform)(profile, config.num_stages)
        counts: list[int] | None = [len(stage.layers) for stage in found.stages]
    else:
        slow = problem.slowness_of(config)
        # The key holds only the settings that determine the cut: many candidates share one.
        key = ("cut", config.microbatch_size, config.tensor, config.num_stages, tuple(slow), tuple(sorted(recomputed)))
        where = config.depth if config.partitioner == "links" else 0
        if within is None:
            counts = problem.once(
                (key, config.partitioner, where), lambda: divide(_time_spans(problem, config, recomputed, slow))
            )
        else:
            times = _time_spans(problem, config, recomputed, slow)
            needs = _needs(problem, config, within.holdings)
            each = zip(needs, within.limits, times, strict=True)
            counts = divide([np.where(need <= limit, time, np.inf) for need, limit, time in each])
    if counts is None:
        return None
    plain = Partition.from_counts(counts)
    replayed = recomputed - set(range(profile.num_frozen(plain)))
    return Partition(
        tuple(
            StageSpec(stage.layers, 1, config.tensor, recompute=index in replayed)
            for index, stage in enumerate(plain.stages)
        )
    )


def _time_spans(problem: Problem, config: Config, recomputed: set[int], slow: list[float]) -> list[Array]:
    profile = problem.at(config.microbatch_size, config.tensor)

    def make() -> tuple[Array, Array]:
        forward = spans([layer.forward_s for layer in profile.layers])
        # A stage that ends with a frozen layer of the beginning has no backward, so it replays nothing.
        trains = (index for index, layer in enumerate(profile.layers) if layer.trained_bytes != 0)
        forward[:, : next(trains, len(profile)) + 1] = 0.0
        return spans(layer_times(profile)), forward

    whole, replay = problem.once(("spans", config.microbatch_size, config.tensor), make)
    replayed = whole + replay
    kinds: dict[tuple[float, bool], Array] = {}
    links = _link_spans(problem, config) if config.partitioner == "links" else 0.0
    result = []
    owner = positions(config)
    for stage in range(config.num_stages):
        kind = slow[owner[stage]], stage in recomputed
        if kind not in kinds:
            kinds[kind] = (replayed if kind[1] else whole) * kind[0] + links
        result.append(kinds[kind])
    return result


def _link_spans(problem: Problem, config: Config) -> Array:
    """Seconds of a stage's messages, over the slowest of the links between stages."""
    topology, ranks = problem.ranks(config.tensor), placement_for(config).ranks
    joints = [topology.level_between(a[0], b[0]) for a, b in pairwise(ranks)]
    pieces = problem.pieces(config.tensor)
    sizes = [size / pieces for size in problem.at(config.microbatch_size, config.tensor).cut_bytes]
    bandwidth = min(level.bandwidth_bytes_per_s for level in joints)
    return message_spans(sizes, bandwidth, max(level.latency_s for level in joints))


def least_bytes(problem: Problem, config: Config) -> float:
    """The smallest memory in which a candidate of one stage per rank fits, with the best cut for memory."""
    needs = _needs(problem, config, holdings_of(config)[config.recompute != "none"])
    counts = divide(needs)
    if counts is None:
        return float("inf")
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return max(float(need[end - count, end]) for need, end, count in zip(needs, ends, counts, strict=True))


def _needs(problem: Problem, config: Config, holdings: tuple[Holding, ...]) -> list[Array]:
    """For each rank the array [a, b]: its peak bytes if its stage held the layers a…b−1."""
    profile = problem.at(config.microbatch_size, config.tensor)
    names = ("wgrad_bytes", "frozen_bytes", "saved_bytes", "kept_bytes")
    sums = {name: spans([getattr(layer, name) for layer in profile.layers]) for name in names}
    cuts = np.array([0.0, *profile.cut_bytes, profile.layers[-1].output_bytes])
    weights, saved = sums["wgrad_bytes"], sums["saved_bytes"]
    entering, leaving = cuts[:, None] + 0 * weights, cuts[None, :] + 0 * weights
    state = problem.state / (config.data if config.sharded else 1)
    result = []
    for stage, holding in enumerate(holdings):
        half = sums["kept_bytes"] if stage else leaving
        sizes = {"weights": weights, "wgrad": weights, "saved": saved, "half": half}
        need = 0 * weights
        for row in holding.rows:
            total = state * weights + sums["frozen_bytes"]
            for count, (kind, owner) in zip(row, holding.keys, strict=True):
                if kind in ("act", "grad"):
                    total = total + count * (leaving if owner == stage else entering)
                elif kind in sizes:
                    total = total + count * sizes[kind]
            need = np.maximum(need, total)
        result.append(need)
    return result
