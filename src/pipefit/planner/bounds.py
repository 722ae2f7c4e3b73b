"""Quick bounds of time and memory, by closed forms: enough to drop most candidates before they are cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipefit.planner.closed_forms import MicrobatchTimes, closed_form_s, exposed_s
from pipefit.planner.holdings import holds_all
from pipefit.planner.space import Config, Problem
from pipefit.spec import Profile


def quick_s(problem: Problem, config: Config) -> float:
    """Seconds per update if the layers could be cut anywhere: a lower bound, roughly, for ranking."""
    total = _totals(problem, config)
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


class _Totals(NamedTuple):
    """Of the whole model: seconds, the slowest layer, the least bytes that a boundary carries, weights, saved bytes."""

    forward_s: float
    backward_s: float
    largest_s: float
    cut_bytes: float
    weight_bytes: float
    saved_bytes: float


def _totals(problem: Problem, config: Config) -> _Totals:
    profile = problem.at(config.microbatch_size, config.tensor)
    layers = profile.layers
    return problem.once(
        ("totals", config.microbatch_size, config.tensor),
        lambda: _Totals(
            sum(layer.forward_s for layer in layers) + profile.loss_s,
            sum(layer.backward_s for layer in layers),
            max(layer.total_s for layer in layers),
            min(profile.cut_bytes, default=0.0),
            sum(layer.weight_bytes for layer in layers),
            sum(layer.saved_bytes for layer in layers),
        ),
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
    total = _totals(problem, config)
    state = problem.state / (config.data if config.sharded else 1)
    versions = 2 if config.schedule == "pipedream-2bw" else 1
    kept = total.saved_bytes if config.recompute == "none" else 0.0
    if config.depth > 1 and not config.replicas and holds_all(config.schedule, config.chunks):
        # At least what enters each of a rank's stages, of every micro-batch.
        kept = max(kept, total.cut_bytes * config.num_stages) * config.per_pipeline
    return float((total.weight_bytes * (1 + versions + state) + kept) / config.depth)
