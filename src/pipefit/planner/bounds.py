"""The closed forms of a step, and quick bounds by them: enough to drop most candidates before they are cut."""

from __future__ import annotations

from pipefit.planner.held import holds_all
from pipefit.planner.space import Config, Ground
from pipefit.spec import Profile

__all__ = ["closed_form_s", "quick_bytes", "quick_s"]


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
    return closed_form_s(config, work, others, message_s) + reduce_s


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


def closed_form_s(config: Config, worst: float, others: float, message_s: float) -> float:
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
