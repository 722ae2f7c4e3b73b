"""Cuts of a candidate's model: by time only, or by time among those that fit the memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from pipefit.partition import gpipe, minmax, uniform
from pipefit.partition.balance import Array, allowed, divide, layer_times, least_maximum, message_spans, spans
from pipefit.planner.computed_profile import num_blocks
from pipefit.planner.holdings import fills, holdings_of, least_replayed, most_bytes
from pipefit.planner.space import Config, Problem, num_frozen_layers, placement_for, positions
from pipefit.spec import Partition, Profile, StageSpec


def cut(
    problem: Problem, config: Config, recomputed: set[int], limits: Sequence[float] | None = None
) -> Partition | None:
    """The stages of a candidate; None when no cut fits the memory.

    Args:
        problem: of the search.
        config: the candidate.
        recomputed: the stages that replay their forward.
        limits: the memory of each rank, which a cut must fit, with one stage per rank; None: only time decides.
    """
    stages = []
    if config.layers:
        copies = config.replicas or (1,) * len(config.layers)
        for layers, count in zip(config.layers, copies, strict=True):
            stages.append(StageSpec(layers, count, recompute=config.recompute))
        return Partition(tuple(stages))
    plain = _divided(problem, config, recomputed, limits)
    if plain is None:
        return None
    frozen = problem.of(config).num_frozen(plain)
    for index, stage in enumerate(plain.stages):
        kind = config.inside
        if index < frozen:
            kind = "none"
        elif index in recomputed:
            kind = "stage"
        stages.append(StageSpec(stage.layers, 1, config.tensor, kind))
    return Partition(tuple(stages))


def _uniform(profile: Profile, num_stages: int) -> Partition:
    """Equal numbers of layers; of a transformer's blocks, as Megatron-LM cuts: with its ends in the outer stages."""
    count, rest = divmod(num_blocks(profile), num_stages)
    if count and not rest:
        return Partition.from_counts([count + (stage == 0) + (stage == num_stages - 1) for stage in range(num_stages)])
    return uniform(profile, num_stages)


def _divided(
    problem: Problem, config: Config, recomputed: set[int], limits: Sequence[float] | None = None
) -> Partition | None:
    """The layers of each stage, by the candidate's partitioner and the speeds of its ranks."""
    profile = problem.of(config)
    slow = problem.slowness_of(config)
    if config.partitioner == "uniform":
        return _uniform(profile, config.num_stages)
    if config.partitioner == "weights":
        return minmax(profile, config.num_stages, [layer.weight_bytes for layer in profile.layers])
    if config.partitioner == "gpipe":
        speeds = [1 / slow[rank] for rank in positions(config)]
        return gpipe(profile, config.num_stages, speeds=speeds)
    if limits is not None:
        times = _time_spans(problem, config, recomputed, slow)
        needs = _needs(problem, config, recomputed)
        fitting = []
        for need, limit, time in zip(needs, limits, times, strict=True):
            fitting.append(np.where(need <= limit, time, np.inf))
        counts = divide(fitting)
    else:
        # The key holds only the settings that determine the cut: many candidates share one.
        again = least_replayed(config)
        replaying = sorted(stage for stage in recomputed if again[stage])
        replays = (config.inside, tuple(replaying))
        where = 0
        if config.partitioner == "links":
            where = config.depth
        key = ("cut", config.microbatch_size, config.tensor, config.num_stages, tuple(slow), replays, where)
        counts = problem.once(key, lambda: divide(_time_spans(problem, config, recomputed, slow)))
    if counts is None:
        return None
    return Partition.from_counts(counts)


def busiest_s(problem: Problem, config: Config, recomputed: set[int]) -> float:
    """Seconds per update of the busiest rank and of the way to its first stage and back, at least; 0: not known.

    Where there is one stage per rank, memory may change the cut: so those of the best cut. Else of the cut by time.
    """
    m = config.per_pipeline
    speeds = set(problem.speeds(config.tensor))
    if len(speeds) > 1 or m == 1 or config.replicas:
        return 0.0
    slow = problem.slowness_of(config)
    by_time = replace(config, partitioner="minmax")
    plain = _time_spans(problem, by_time, (), slow)
    work = _time_spans(problem, by_time, recomputed, slow)
    # Ranks that do not train are a part of the next update meanwhile.
    way = np.zeros(len(problem.profile) + 1)
    is_frozen = problem.profile.layers[0].trained_bytes == 0
    if fills(config) and not is_frozen:
        way = plain[0][0]
    loads: dict[tuple[int, float], Array] = {}
    of_stage = []
    for own, whole, share in zip(plain, work, least_replayed(config, is_frozen), strict=True):
        key = (id(whole), share)
        if key not in loads:
            loads[key] = m * (own + share * (whole - own))
        of_stage.append(loads[key])
    if config.chunks == 1:
        with_way = {}
        for load in loads.values():
            with_way[id(load)] = allowed(load + way[:, None])
        return least_maximum([with_way[id(load)] for load in of_stage])
    chosen = _divided(problem, config, recomputed)
    assert chosen is not None
    busy_s: dict[int, float] = {}
    for rank, load, stage in zip(positions(config), of_stage, chosen.stages, strict=True):
        start = stage.layers[0]
        end = stage.layers[-1] + 1
        way_s = float(way[start])
        busy_s[rank] = busy_s.get(rank, way_s) + float(load[start, end])
    return max(busy_s.values())


def _time_spans(problem: Problem, config: Config, recomputed: Collection[int], slow: list[float]) -> list[Array]:
    profile = problem.of(config)

    def make() -> tuple[Array, Array]:
        forward = spans([layer.forward_s for layer in profile.layers])
        # A stage that ends with a frozen layer of the beginning has no backward, so it replays nothing.
        forward[:, : num_frozen_layers(profile) + 1] = 0.0
        return spans(layer_times(profile)), forward

    whole, replay = problem.once(("spans", config.microbatch_size, config.tensor, config.inside), make)
    replayed = whole + replay
    kinds: dict[tuple[float, bool], Array] = {}
    links: Array | float = 0.0
    if config.partitioner == "links":
        links = _link_spans(problem, config)
    result = []
    owner = positions(config)
    again = least_replayed(config)
    for stage in range(config.num_stages):
        factor = slow[owner[stage]]
        replays = stage in recomputed and again[stage] > 0
        if (factor, replays) not in kinds:
            times = whole
            if replays:
                times = replayed
            kinds[factor, replays] = times * factor + links
        result.append(kinds[factor, replays])
    return result


def _link_spans(problem: Problem, config: Config) -> Array:
    """Seconds of a stage's messages, over the slowest of the links between stages."""
    topology = problem.ranks(config.tensor)
    ranks = placement_for(config).ranks
    firsts = [copies[0] for copies in ranks]
    joints = [topology.level_between(a, b) for a, b in pairwise(firsts)]
    pieces = problem.pieces(config.tensor)
    cut_bytes = problem.at(config.microbatch_size, config.tensor).cut_bytes
    sizes = [size / pieces for size in cut_bytes]
    bandwidth = min(level.bandwidth_bytes_per_s for level in joints)
    latency_s = max(level.latency_s for level in joints)
    return message_spans(sizes, bandwidth, latency_s)


def least_bytes(problem: Problem, config: Config) -> float:
    """The smallest memory in which a candidate of one stage per rank fits, with the best cut for memory."""
    needs = _needs(problem, config, range(config.depth))
    counts = divide(needs)
    if counts is None:
        return float("inf")
    least = 0.0
    for need, place in zip(needs, pairwise(accumulate(counts, initial=0)), strict=True):
        least = max(least, float(need[place]))
    return least


def _needs(problem: Problem, config: Config, recomputed: Collection[int]) -> list[Array]:
    """For each rank the array [a, b]: its peak bytes if its stage held the layers a…b−1, where some stages replay."""
    profile = problem.of(config)
    plain = problem.at(config.microbatch_size, config.tensor)
    layers = profile.layers
    weights = spans([layer.wgrad_bytes for layer in layers])
    frozen = spans([layer.frozen_bytes for layer in layers])
    saved = spans([layer.saved_bytes for layer in layers])
    kept = spans([layer.kept_bytes for layer in layers])
    cuts = np.array([0.0, *profile.cut_bytes, layers[-1].output_bytes])
    entering = cuts[:, None] + 0 * weights
    leaving = cuts[None, :] + 0 * weights
    always = problem.state_of(config) * weights + frozen
    if config.inside == "layer":
        saved = saved + profile.made_bytes
    if config.inside != "none":
        replays = [layer.replay_bytes(config.inside) for layer in plain.layers]
        always = always + _largest(replays)
    figures = {"act": leaving, "grad": leaving, "weights": weights, "wgrad": weights, "saved": saved, "half": kept}
    if config.shares_gradients:
        figures["sums"] = weights / config.data
    if config.shares_weights:
        # Frozen weights are shared, too.
        whole = weights + frozen
        figures["weights"] = whole
        always = always - frozen + whole / config.data
    needs = []
    for stage, holding in enumerate(holdings_of(config, recomputed)):
        spans_of = partial(_spans_of, figures, entering, stage)
        needs.append(always + most_bytes(holding, spans_of))
    return needs


def _spans_of(figures: Mapping[str, Array], entering: Array, stage: int, kind: str, owner: int) -> Array:
    """The array [a, b]: bytes of a value that a stage holds, if it has the layers a…b−1; `owner` makes the value."""
    if kind in ("act", "grad") and owner != stage:
        return entering
    if kind == "half" and stage == 0:
        # Between the halves of a backward the first stage keeps the gradient of its output.
        return figures["grad"]
    return figures.get(kind, np.zeros_like(entering))


def _largest(figures: list[float]) -> Array:
    """The array [a, b]: the largest of the figures a…b−1."""
    count = len(figures)
    table = np.zeros((count + 1, count + 1))
    for a in range(count):
        table[a, a + 1 :] = np.maximum.accumulate(figures[a:])
    return table
