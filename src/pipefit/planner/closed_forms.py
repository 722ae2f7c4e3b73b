"""Closed forms of a step, without a simulation: of a candidate with its cut, and quick bounds before the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipefit.cost import CostModel
from pipefit.cost.rings import all_reduce_s, ring_of
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.planner.holdings import holds_all, least_in_flight, replayed
from pipefit.planner.space import Config, Problem, placement_for, positions
from pipefit.spec import Partition, Profile


@dataclass(frozen=True)
class MicrobatchTimes:
    """Arguments of the closed forms: seconds per micro-batch of one pipeline.

    Attributes:
        forward_s: of the slowest rank, all its chunks together.
        backward_s: of the same, replays included.
        through_s: forward and backward of all ranks, without replays: those fill the wait for a gradient.
        message_s: on the busiest link, one way: a rank's chunks all send over it.
        way_s: of all messages of one micro-batch, one way.
        trip_s: the longest round trip per micro-batch in flight: rank r has p − r of them.
    """

    forward_s: float
    backward_s: float
    through_s: float
    message_s: float = 0.0
    way_s: float = 0.0
    trip_s: float = 0.0


def closed_form_s(config: Config, times: MicrobatchTimes) -> float:
    """Seconds of an update without reductions: the schedules' closed forms, for stages and links that differ.

    The time per micro-batch is that of the slowest part (a rank, a link, or a round trip that the schedule has too few
    micro-batches in flight to hide); the first and the last micro-batch also pass through all other parts.
    """
    m, p, v = config.per_pipeline, config.depth, config.chunks
    work = times.forward_s + times.backward_s
    others = max(times.through_s - work, 0.0)
    through = times.through_s + 2 * times.way_s
    if p == 1:
        return m * work
    if config.replicas:
        return (m - 1) * max(work, times.message_s) + through
    if config.schedule == "interleaved":
        # The first chunk has about 2p micro-batches in flight.
        rhythm = max(work, times.message_s, through / (2 * p))
        return m * rhythm + others / v + 2 * times.way_s
    if config.schedule in ("gpipe", "breadth-first"):
        # Each chunk is a pipeline that begins when the previous one has finished its first micro-batch.
        forward, backward = max(times.forward_s, times.message_s), max(times.backward_s, times.message_s)
        lap = through / v
        return max(m * (forward + backward) + lap - (forward + backward) / v, through + (m - 1) * (work / v))
    rhythm = max(work, times.message_s, times.trip_s)
    if config.schedule.startswith("pipedream"):
        return m * rhythm
    return m * rhythm + others + 2 * times.way_s * (p - 2) / (p - 1)


def exposed_s(tails: list[float], remaining: list[float]) -> float:
    """Seconds that reductions and optimizer steps add to an update.

    Args:
        tails: seconds of each stage's reduction and step.
        remaining: seconds between the stage's last backward and the last of all.
    """
    return max(0.0, *(tail - rest for tail, rest in zip(tails, remaining, strict=True)))


def estimate_s(problem: Problem, config: Config, partition: Partition, cost: CostModel) -> float:
    """Seconds per update of a candidate with its cut."""
    placement = placement_for(config).ranks
    stages = _stage_seconds(problem, config, partition, cost)
    sends = [Instruction(Op.SEND, stage, 0, kind="act", peer=ranks[0]) for stage, ranks in enumerate(placement[1:])]
    hops = [cost.message_s(send, ranks[0]) for send, ranks in zip(sends, placement, strict=False)]
    tails = [cost.reduce_s(reduction_of(stage), ranks) + cost.step_s[stage] for stage, ranks in enumerate(placement)]
    update_s = closed_form_s(config, _times(config, stages, hops))
    if config.schedule == "1f1b" and not config.replicas and config.depth > 1:
        update_s = max(update_s, _flush_s(config.per_pipeline, stages, hops))
    return update_s + exposed_s(tails, _until_end(config, stages, hops))


def reduction_of(stage: int) -> Instruction:
    """The sum of a stage's gradients over its copies."""
    return Instruction(Op.REDUCE, stage, version=0, kind="wgrad")


class _Stage(NamedTuple):
    """Seconds of one micro-batch on the stage's rank."""

    forward_s: float
    backward_s: float
    replay_s: float

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s + self.replay_s


def _stage_seconds(problem: Problem, config: Config, partition: Partition, cost: CostModel) -> list[_Stage]:
    slow = problem.slowness_of(config)
    owner = positions(config)
    each = cost.overhead_s + 2 * cost.post_s
    again = replayed(config) if any(stage.is_replayed for stage in partition.stages) else ()
    found = []
    for stage, spec in enumerate(partition.stages):
        slowness, replays = slow[owner[stage]], again[stage] if spec.is_replayed else 0.0
        forward = cost.forward_s[stage] + (cost.loss_s if stage == len(partition.stages) - 1 else 0.0)
        backward = cost.backward_input_s[stage] + cost.backward_weight_s[stage]
        replay = replays * (cost.recompute_s[stage] * slowness + each)
        found.append(_Stage(forward * slowness + each, backward * slowness + each, replay))
    return found


def _times(config: Config, stages: list[_Stage], hops: list[float]) -> MicrobatchTimes:
    owner, copies = positions(config), config.replicas or (1,) * len(stages)
    forward, work, message, both = ([0.0] * config.depth for _ in range(4))
    for stage, (rank, own) in enumerate(zip(owner, stages, strict=True)):
        forward[rank] += own.forward_s / copies[stage]
        work[rank] += own.work_s / copies[stage]
        both[rank] += own.forward_s + own.backward_s
    for stage, hop in enumerate(hops):
        message[owner[stage]] += hop / max(copies[stage], copies[stage + 1])
    worst = work.index(max(work))
    slowest = forward[worst], work[worst] - forward[worst]
    if config.schedule in ("gpipe", "breadth-first"):
        # One chunk after the other, each at the rate of its slowest stage: forwards, then backwards.
        chunks = [stages[k : k + config.depth] for k in range(0, len(stages), config.depth)]
        slowest = (
            sum(max(own.forward_s for own in chunk) for chunk in chunks),
            sum(max(own.backward_s + own.replay_s for own in chunk) for chunk in chunks),
        )
    trips = [(sum(both[rank:]) + 2 * sum(hops[rank:])) / (config.depth - rank) for rank in range(config.depth)]
    return MicrobatchTimes(*slowest, sum(both), max(message), sum(hops), max(trips))


def _flush_s(count: int, stages: list[_Stage], hops: list[float]) -> float:
    """1F1B: every rank processes its micro-batches, and waits for the return of the first one and of the last one.

    Rank r has k = min(p − r, m) micro-batches in flight. Before the first returns it has k − 1 more forwards to do, and
    after its last forward k − 1 backwards before that micro-batch returns; a replay is done while it waits.
    """
    depth, longest = len(stages), 0.0
    before, below = 0.0, sum(own.forward_s + own.backward_s for own in stages) + 2 * sum(hops)
    for rank, own in enumerate(stages):
        both, way = own.forward_s + own.backward_s, 2 * hops[rank] if rank < len(hops) else 0.0
        below -= both
        more = min(depth - rank, count) - 1
        first = max(0.0, below - more * own.forward_s - own.replay_s)
        last = max(0.0, below - more * own.backward_s - (more + 1) * own.replay_s)
        waits = first + last if count > more + 1 else max(first, last)
        longest = max(longest, before + count * own.work_s + waits)
        below -= way
        before += both + way
    return longest


def _until_end(config: Config, stages: list[_Stage], hops: list[float]) -> list[float]:
    """Seconds between each stage's last backward and the last of all: the path down, or its rank's remaining work.

    Of each remaining chunk a rank still has to do all micro-batches (breadth-first), or those of one turn.
    """
    turn = config.per_pipeline if config.schedule == "breadth-first" else min(config.depth, config.per_pipeline)
    found: list[float] = []
    way_s = 0.0
    for stage, own in enumerate(stages):
        below = stage - config.depth
        found.append(max(way_s, found[below] + turn * stages[below].backward_s) if below >= 0 else way_s)
        way_s += own.backward_s + (hops[stage] if stage < len(hops) else 0.0)
    return found


# ----------------------------------------------------------- bounds before the cut of a candidate is known


def quick_s(problem: Problem, config: Config) -> float:
    """Seconds per update if the layers could be split anywhere: an approximate lower bound for ranking."""
    total = _totals(problem, config)
    work = total.forward_s + total.backward_s
    backward_s = total.backward_s + _least_replayed(problem, config) * total.forward_s
    if config.replicas:
        share = 1 / sum(config.replicas)
    else:
        share = max(1 / config.depth, total.largest_s / (work or 1.0))
    message_s = way_s = trip_s = 0.0
    if config.depth > 1:
        link = problem.ranks(config.tensor).level_between(0, 1)
        hop_s = total.cut_bytes / problem.pieces(config.tensor) / link.bandwidth_bytes_per_s + link.latency_s
        message_s = hop_s * config.chunks / (max(config.replicas) if config.replicas else 1)
        way_s = hop_s * (config.num_stages - 1)
        trip_s = (work + 2 * way_s) / config.depth
    pace = MicrobatchTimes(share * total.forward_s, share * backward_s, work, message_s, way_s, trip_s)
    return closed_form_s(config, pace) + _quick_tail_s(problem, config, total.backward_s)


class _Totals(NamedTuple):
    """Of the whole model: seconds, the slowest layer, the least bytes across a boundary, weights, saved bytes."""

    forward_s: float
    backward_s: float
    largest_s: float
    cut_bytes: float
    weight_bytes: float
    wgrad_bytes: float
    saved_bytes: float


def _totals(problem: Problem, config: Config) -> _Totals:
    profile = problem.of(config)
    layers = profile.layers
    return problem.once(
        ("totals", config.microbatch_size, config.tensor, config.inside),
        lambda: _Totals(
            sum(layer.forward_s for layer in layers) + profile.loss_s,
            sum(layer.backward_s for layer in layers),
            max(layer.total_s for layer in layers),
            min(profile.cut_bytes, default=0.0),
            sum(layer.weight_bytes for layer in layers),
            sum(layer.wgrad_bytes for layer in layers),
            sum(layer.saved_bytes for layer in layers),
        ),
    )


def _quick_tail_s(problem: Problem, config: Config, backward_s: float) -> float:
    """Seconds that reductions add if every stage has an equal share of the time, with the weights of that share."""
    if config.data < 2:
        return 0.0
    copies = range(0, config.data * config.depth, config.depth)
    ring = problem.once(("ring", config.tensor, copies), lambda: ring_of(problem.ranks(config.tensor), copies))
    weights = problem.once(
        ("weights", config.microbatch_size, config.tensor, config.num_stages),
        lambda: _shares(problem.at(config.microbatch_size, config.tensor), config.num_stages),
    )
    behind = [stage * backward_s / config.num_stages for stage in range(config.num_stages)]
    return exposed_s([all_reduce_s(ring, size) for size in weights], behind)


def _shares(profile: Profile, num_stages: int) -> list[float]:
    """Bytes of trained weights of equal shares of the time; a layer's bytes are spread evenly over its own time."""
    times = np.cumsum([0.0, *(layer.total_s for layer in profile.layers)])
    weights = np.cumsum([0.0, *(layer.wgrad_bytes for layer in profile.layers)])
    if not times[-1]:
        return [float(weights[-1]) / num_stages] * num_stages
    ends = np.interp(np.linspace(0.0, times[-1], num_stages + 1), times, weights)
    return [float(size) for size in np.diff(ends)]


def quick_bytes(problem: Problem, config: Config, at_least: bool = True) -> float:
    """Bytes that some rank needs at least, for any cut of the layers; or about as many, to compare candidates."""
    total = _totals(problem, config)
    kept = total.saved_bytes if config.recompute not in ("stage", "some") else 0.0
    if config.depth > 1 and not config.replicas and holds_all(config.schedule, config.chunks):
        # At least the inputs of each of a rank's stages, of every micro-batch.
        kept = max(kept, total.cut_bytes * config.num_stages)
    return float(max((kept + fixed) / ranks for fixed, ranks in _room(problem, config, at_least)))


def _room(problem: Problem, config: Config, at_least: bool = True) -> list[tuple[float, float]]:
    """Pairs (x, y): what the ranks keep of one micro-batch, in sum, and x are at most y times the memory of one.

    Rank r keeps k(r) micro-batches. The largest of its bytes over all r is at least any weighted mean of them: with
    the weights 1 and 1/k(r).
    """
    total = _totals(problem, config)
    state = problem.state / (config.data if config.sharded else 1)
    p, m = config.depth, config.per_pipeline
    versions = 2 if config.schedule == "pipedream-2bw" else 1
    if at_least and config.chunks > 1 and (config.schedule != "interleaved" or m < 2 * p):
        # When the most is held, only the last chunk has gradients.
        versions = 0
    fixed = total.weight_bytes + total.wgrad_bytes * (versions + state)
    if config.replicas or p == 1:
        return [(fixed, p)]
    if holds_all(config.schedule, config.chunks):
        return [(fixed / m, p / m)]
    if config.schedule not in ("1f1b", "interleaved"):
        return [(fixed, p)]
    each = [1 / k for k in least_in_flight(config)]
    return [(fixed, p), (fixed * min(each), sum(each))]


def _least_replayed(problem: Problem, config: Config) -> float:
    """The share of the layers that are replayed at least because the memory lacks room for more."""
    # Nothing is replayed where the backward follows its forward at once, as on the last rank of 1F1B.
    most = 1 - 1 / config.depth
    kept = _totals(problem, config).saved_bytes
    if config.recompute != "some" or not kept:
        return most if config.recompute == "stage" else 0.0
    limit = max(problem.memory_of(config))
    room = min(limit * ranks - fixed for fixed, ranks in _room(problem, config))
    return min(max(1 - room / kept - 1 / config.depth, 0.0), most)
