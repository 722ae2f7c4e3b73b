"""Quick bounds of time and memory, by closed forms: enough to drop most candidates before they are cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipefit.planner.closed_forms import MicrobatchTimes, closed_form_s, exposed_s
from pipefit.planner.holdings import holds_all
from pipefit.planner.space import Config, Problem
from pipefit.spec import Profile


def quick_s(problem: Problem, config: Config) -> float:
    """Seconds per update if the layers could be cut anywhere: a lower bound, roughly, for ranking."""
    total = problem.once(
        ("quick", config.microbatch_size, config.tensor),
        lambda: _totals(problem.at(config.microbatch_size, config.tensor)),
    )
    # Where the backward follows its forward at once nothing is replayed, as on the last rank of 1F1B.
    replayed = 1 - 1 / config.depth if config.recompute == "all" else 0.0
    work = total.forward_s + total.backward_s
    backward_s = total.backward_s + replayed * total.forward_s
    if config.replicas:
        share = 1 / sum(config.replicas)
    else:
        share = max(1 / config.depth, total.largest_s / (work or 1.0))
    message_s = way_s = trip_s = 0.0
    if config.depth > 1:
        link = problem.ranks(config.tensor).level_between(0, 1)
        hop_s = total.cut_bytes / config.tensor / link.bandwidth_bytes_per_s + link.latency_s
        message_s = hop_s * config.chunks / (max(config.replicas) if config.replicas else 1)
        way_s = hop_s * (config.num_stages - 1)
        trip_s = (work + 2 * way_s) / config.depth
    pace = MicrobatchTimes(share * total.forward_s, share * backward_s, work, message_s, way_s, trip_s)
    return closed_form_s(config, pace) + _quick_tail_s(problem, config, total.backward_s)


@dataclass(frozen=True)
class _Totals:
    """Of the whole model: seconds, the slowest layer, the least bytes that a boundary carries."""

    forward_s: float
    backward_s: float
    largest_s: float
    cut_bytes: float


def _totals(profile: Profile) -> _Totals:
    return _Totals(
        sum(layer.forward_s for layer in profile.layers) + profile.loss_s,
        sum(layer.backward_s for layer in profile.layers),
        max(layer.total_s for layer in profile.layers),
        min(profile.cut_bytes, default=0.0),
    )


def _quick_tail_s(problem: Problem, config: Config, backward_s: float) -> float:
    """Seconds that reductions add if every stage has an equal share of the time, and the weights that lie there."""
    if config.data < 2:
        return 0.0
    link = problem.ranks(config.tensor).level_between(0, config.depth)
    per_byte = 2 * (config.data - 1) / config.data / link.bandwidth_bytes_per_s
    weights = problem.once(
        ("weights", config.microbatch_size, config.tensor, config.num_stages),
        lambda: _shares(problem.at(config.microbatch_size, config.tensor), config.num_stages),
    )
    behind = [stage * backward_s / config.num_stages for stage in range(config.num_stages)]
    return exposed_s([size * per_byte for size in weights], behind)


def _shares(profile: Profile, num_stages: int) -> list[float]:
    """Weight bytes of equal shares of the time, a layer's spread evenly over its own."""
    times = np.cumsum([0.0, *(layer.total_s for layer in profile.layers)])
    weights = np.cumsum([0.0, *(layer.weight_bytes for layer in profile.layers)])
    if not times[-1]:
        return [float(weights[-1]) / num_stages] * num_stages
    ends = np.interp(np.linspace(0.0, times[-1], num_stages + 1), times, weights)
    return [float(size) for size in np.diff(ends)]


def quick_bytes(problem: Problem, config: Config) -> float:
    """Bytes that some rank needs at least, however the layers are cut."""
    profile = problem.at(config.microbatch_size, config.tensor)
    weights, saved, cut = problem.once(
        ("bytes", config.microbatch_size, config.tensor),
        lambda: (
            sum(x.weight_bytes for x in profile.layers),
            sum(x.saved_bytes for x in profile.layers),
            min(profile.cut_bytes, default=0.0),
        ),
    )
    state = problem.state / (config.data if config.sharded else 1)
    versions = 2 if config.schedule == "pipedream-2bw" else 1
    kept = saved if config.recompute == "none" else 0.0
    if config.depth > 1 and not config.replicas and holds_all(config.schedule, config.chunks):
        # At least what enters each of a rank's stages, of every micro-batch.
        kept = max(kept, cut * config.num_stages) * config.per_pipeline
    return float((weights * (1 + versions + state) + kept) / config.depth)
