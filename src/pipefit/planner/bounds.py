"""Lower bounds of a candidate: seconds per update with its cut, and seconds and bytes before the cut is known.

Legend: p depth, v chunks, m micro-batches per pipeline, f and b seconds of a stage's forward and backward.

No candidate is faster than its bound, whatever its devices. A rank is busy with all of its micro-batches. Where its
schedule gives it too little else to do, it also waits for a micro-batch to return: for the first one, and for the last.
From update to update the way from a rank above and back to it come on top, and that rank's reduction and step. Before
the cut is known, layers are divided as finely as is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import add
from typing import NamedTuple

import numpy as np

from pipefit.cost import CostModel
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import WeightRule
from pipefit.planner.holdings import ahead_of, fills, least_in_flight, least_replayed
from pipefit.planner.shared_copies import shared_s
from pipefit.planner.space import Config, Problem, busiest_copy, num_frozen_layers, placement_for, positions
from pipefit.schedules import find
from pipefit.spec import Partition, Profile


def reduction_of(stage: int) -> Instruction:
    """The sum of a stage's gradients over its copies."""
    return Instruction(Op.REDUCE, stage, version=0, kind="wgrad")


def crowded(cost: CostModel) -> bool:
    """Returns whether a message may be on a link when the next one is sent: then messages must queue there.

    Between two messages on a link a rank works on a stage at least once. Where that takes longer than any message,
    queues change nothing, and the simulator is faster without them.
    """
    backward = map(add, cost.backward_input_s, cost.backward_weight_s)
    shortest_s: float = min([*cost.forward_s, *filter(None, backward)])
    work_s = shortest_s / max(cost.speed, default=1.0)
    farthest = 0
    if cost.topology:
        farthest = cost.topology.num_devices - 1
    bandwidth, latency = cost.link(0, farthest)
    sizes = (*cost.act_bytes[:-1], *cost.grad_bytes[:-1])
    largest = max(sizes, default=0.0)
    return latency + largest / bandwidth > work_s


# ------------------------------------------------------------------------------------------- seconds with the cut


class _Stage(NamedTuple):
    """Seconds of a stage on the rank that runs it in one pipeline.

    Attributes:
        rank: its place in the pipeline.
        num: micro-batches that it processes per update.
        forward_s: of one micro-batch, the loss included.
        backward_s: of one.
        replay_s: of one; 0 where nothing is replayed.
        back_s: of the part of a backward after which the gradient of the input can be sent.
        out_s: of the message to the next stage.
        in_s: of the message back from it.
        reduce_s: of the sum of gradients over the copies.
        step_s: of the optimizer.
    """

    rank: int
    num: int
    forward_s: float
    backward_s: float
    replay_s: float
    back_s: float
    out_s: float
    in_s: float
    reduce_s: float
    step_s: float

    @property
    def work_s(self) -> float:
        """Seconds of all micro-batches."""
        return self.num * (self.forward_s + self.backward_s + self.replay_s)

    @property
    def way_s(self) -> float:
        """Seconds that a micro-batch takes through the stage, to the next one and back."""
        return self.forward_s + self.back_s + self.out_s + self.in_s


def least_s(problem: Problem, config: Config, partition: Partition, cost: CostModel) -> float:
    """Seconds from update to update that a candidate with its cut takes at least.

    Args:
        problem: that it solves.
        config: the candidate.
        partition: its stages.
        cost: of them.
    """
    frozen = problem.profile.num_frozen(partition)
    queued = crowded(cost)
    replays = _replays(config, partition, frozen > 0)
    bounds = [_shared_s(config, cost)]
    if config.shares_gradients:
        bounds += shared_s(config, cost, frozen)
    for ranks in _pipelines(config, cost):
        bounds += _flushes(config, list(_stages(config, cost, ranks, replays, frozen)), frozen, queued)
    return max(bounds)


def _shared_s(config: Config, cost: CostModel) -> float:
    """Seconds of all ranks together on the cores that they share, where they are on one machine."""
    num_ranks = sum(config.replicas) or config.depth * config.data
    machine, cores = cost.machine_of(0)
    if cost.machine_of(num_ranks - 1)[0] != machine:
        return 0.0
    each_s = sum(cost.forward_s) + sum(cost.backward_input_s) + sum(cost.backward_weight_s)
    return config.num_microbatches * each_s / max(cost.speed, default=1.0) / cores


def _pipelines(config: Config, cost: CostModel) -> list[Indices]:
    """The ranks of each stage, pipeline by pipeline; of pipelines that are equally fast one.

    Micro-batches alternate between unequal numbers of copies: they are at least as fast as on the fastest of each.
    """
    placement = placement_for(config).ranks
    if not cost.speed:
        return [tuple(ranks[0] for ranks in placement)]
    if config.shares:
        return [tuple(busiest_copy(config)[rank] for rank in positions(config))]
    speed = cost.speed.__getitem__
    if config.replicas:
        return [tuple(max(ranks, key=speed) for ranks in placement)]
    by_speed = {}
    for ranks in zip(*placement, strict=True):
        own = tuple(map(speed, ranks))
        by_speed[own] = ranks
    return list(by_speed.values())


def _replays(config: Config, partition: Partition, is_frozen: bool) -> list[float]:
    """The share of each stage's forwards that are replayed."""
    stages = partition.stages
    if not any(stage.is_replayed for stage in stages):
        return [0.0] * len(stages)
    shares = []
    for share, stage in zip(least_replayed(config, is_frozen), stages, strict=True):
        shares.append(share * stage.is_replayed)
    return shares


def _stages(
    config: Config, cost: CostModel, pipeline: Sequence[int], replays: Sequence[float], frozen: int
) -> Iterator[_Stage]:
    placement = placement_for(config).ranks
    last = cost.num_stages - 1
    is_whole = fills(config)
    for stage, rank in enumerate(pipeline):
        ranks = placement[stage]
        speed = 1.0
        if cost.speed:
            speed = cost.speed[rank]
        forward_s = cost.forward_s[stage]
        if stage == last:
            forward_s += cost.loss_s
        back_s = cost.backward_input_s[stage]
        whole_s = back_s + cost.backward_weight_s[stage]
        if is_whole:
            back_s = whole_s
        out_s = in_s = 0.0
        if stage < last and rank != pipeline[stage + 1]:
            after = pipeline[stage + 1]
            act = Instruction(Op.SEND, stage, 0, kind="act", peer=after)
            out_s = cost.message_s(act, rank)
            if stage >= frozen:
                grad = Instruction(Op.SEND, stage, 0, kind="grad", peer=rank)
                in_s = cost.message_s(grad, after)
        place = rank % config.depth
        num = config.num_microbatches // len(ranks)
        if config.replicas:
            place = stage
        elif config.shares:
            num = config.per_pipeline
        yield _Stage(
            place,
            num,
            forward_s / speed,
            whole_s / speed,
            replays[stage] * cost.recompute_s[stage] / speed,
            back_s / speed,
            out_s,
            in_s,
            cost.reduce_s(reduction_of(stage), ranks),
            cost.step_s[stage] / speed,
        )


def _flushes(config: Config, stages: list[_Stage], frozen: int, queued: bool) -> Iterator[float]:
    """Of each rank, and of each link where messages queue, seconds from update to update.

    A rank that does not train begins the next update while the others are still at this one.
    """
    schedule = find(config.schedule)
    is_filled = fills(config)
    way_s = 0.0
    before_s = float("-inf")
    for rank in range(config.depth):
        own = [stage for stage in stages if stage.rank == rank]
        first = own[0]
        work_s = sum(stage.work_s for stage in own)
        yield work_s + sum(stage.step_s for stage in own)
        if queued:
            yield sum(stage.num * stage.out_s for stage in own)
            yield sum(stage.num * stage.in_s for stage in own)
        if rank < frozen or not (schedule.is_synchronous and schedule.flushes):
            continue
        yield work_s + first.reduce_s + first.step_s
        before_s = max(before_s, first.reduce_s + first.step_s - way_s)
        begins_s = way_s + before_s
        if is_filled:
            yield begins_s + work_s + _wait_s(config, stages, rank)
        else:
            for stage in own:
                work_s -= stage.num * (stage.backward_s - stage.back_s)
            yield begins_s + work_s
        way_s += first.way_s


def _below_s(stages: list[_Stage], first: int, last: int) -> float:
    """Seconds from the end of a stage's forward to the beginning of a stage's backward of the same micro-batch."""
    seconds = stages[first].out_s
    for stage in stages[first + 1 :]:
        seconds += stage.forward_s + stage.out_s
    seconds += stages[last].in_s
    for stage in stages[last + 1 :]:
        seconds += stage.back_s + stage.in_s
    return seconds


def _wait_s(config: Config, stages: list[_Stage], rank: int) -> float:
    """Seconds that a rank waits for the return of micro-batches, by the number of forwards ahead of its backwards."""
    known = ahead_of(config)
    if not known:
        return 0.0
    own = [stage for stage in stages if stage.rank == rank]
    places = [index for index, stage in enumerate(stages) if stage.rank == rank]
    last = places[-1]
    m = own[0].num
    waits = [0.0]
    if config.chunks == 1:
        # Another micro-batch enters when one has returned.
        trips = -(-m // known[rank][0])
        trip_s = own[0].forward_s + _below_s(stages, rank, rank) + own[0].backward_s
        waits.append(trips * trip_s - own[0].work_s)
    if min(map(min, known)) == m:
        # All forwards come before all backwards, on the ranks below too.
        turn_s = _below_s(stages, last, last)
        if own[-1].replay_s:
            turn_s -= own[-1].forward_s
        waits.append(turn_s)
    # For the first micro-batch, and for the last one.
    first_s = own[0].forward_s + _below_s(stages, rank, last) - own[-1].replay_s
    last_s = own[0].backward_s + _below_s(stages, last, rank)
    for count, stage in zip(known[rank], own, strict=True):
        first_s -= count * stage.forward_s
        last_s -= count * (stage.backward_s + stage.replay_s)
    if sum(known[rank]) == m * len(own):
        waits += [first_s, last_s]
    else:
        waits.append(max(first_s, 0.0) + max(last_s, 0.0))
    return max(waits)


# ------------------------------------------------------------------------------ seconds and bytes before the cut


def quick_s(problem: Problem, config: Config) -> float:
    """Seconds from update to update that any cut of the layers takes at least."""
    total = _totals(problem, config)
    m = config.per_pipeline
    p = config.depth
    step_s = total.step_s
    if config.shard != "none":
        step_s /= config.data
    # A rank that does not train is a part of the next update meanwhile.
    has_way = p > 1 and config.chunks == 1 and not (config.replicas or total.is_frozen)
    is_filled = has_way and fills(config)
    bounds = []
    for speeds in _speeds_of_pipelines(problem, config):
        # The seconds of all ranks together; a last rank that replays nothing may have most of the forwards.
        again_s = _again_s(config, total)
        saved = 0.0
        if again_s:
            saved = total.forward_share * max(speeds)
        together_s = m * (total.work_s + again_s) + step_s
        bounds.append(together_s / (sum(speeds) + saved))
        if is_filled:
            counts = tuple(count for each in ahead_of(config) for count in each)
            bounds.append(_fill(p, m, counts) * total.work_s / max(speeds))
    return max(bounds)


@lru_cache(maxsize=4096)
def _fill(p: int, m: int, ahead: Indices) -> float:
    """Seconds of an update of p ranks with a stage each, per second of work on a micro-batch, for any cut at least.

    Rank r takes at least Σ c[r, s]·w[s], w the work of each stage on a micro-batch: the way to it and back, m times its
    own work, and its waits (`_wait_s`; half of the work is taken for forwards). Of the ranks with the weights u the
    mean is at least that, too. Where these weights give every stage the same factor, no cut is better:
    with GPipe's and 1F1B's waits (m > p) it is (m + p − 1)/p.
    """
    way = np.tril(np.ones((p, p)), -1)
    waits = np.zeros((p, p))
    for rank, count in enumerate(ahead):
        if min(ahead) == m:
            waits[rank, rank + 1 :] = 1
        elif count < m:
            waits[rank, rank] = 1 - count
            waits[rank, rank + 1 :] = 2
    busy = way + m * np.eye(p)
    found = 1.0
    for factors in (busy + waits, busy):
        with suppress(np.linalg.LinAlgError):
            weights = np.linalg.solve(factors.T, np.ones(p))
            if min(weights) >= 0:
                found = max(found, float(1 / sum(weights)))
    return found


def _speeds_of_pipelines(problem: Problem, config: Config) -> set[tuple[float, ...]]:
    """The speeds of the ranks of each pipeline; of unequal replicas, those of all ranks."""
    p = config.depth
    speeds = problem.speeds(config.tensor)
    if config.replicas:
        return {speeds or (1.0,) * problem.topology.num_devices}
    if not speeds:
        return {(1.0,) * p}
    if config.shares:
        return {tuple(speeds[rank] for rank in busiest_copy(config))}
    found = set()
    for first in range(0, p * config.data, p):
        found.add(speeds[first : first + p])
    return found


def _again_s(config: Config, total: _Totals) -> float:
    """Seconds of replays of one micro-batch, on whichever rank replays them."""
    if config.recompute != "stage":
        return 0.0
    # The share of all stages but one, which may replay nothing.
    share = sorted(least_replayed(config, total.is_frozen))[:2][-1]
    return share * total.replayed_s


class _Totals(NamedTuple):
    """Figures of the whole model, for one micro-batch.

    Attributes:
        work_s: of forwards, loss and backwards.
        replayed_s: of the forwards that may be replayed.
        forward_share: the largest share of the forward in a layer's time.
        step_s: of the optimizer.
        is_frozen: the first layer does not train.
        cut_bytes: the least across a boundary.
        weight_bytes: of all weights.
        wgrad_bytes: of those that train.
        saved_bytes: kept for the backward.
    """

    work_s: float
    replayed_s: float
    forward_share: float
    step_s: float
    is_frozen: bool
    cut_bytes: float
    weight_bytes: float
    wgrad_bytes: float
    saved_bytes: float


def _totals(problem: Problem, config: Config) -> _Totals:
    key = ("totals", config.microbatch_size, config.tensor, config.inside)
    return problem.once(key, lambda: _summed(problem.of(config)))


def _summed(profile: Profile) -> _Totals:
    layers = profile.layers
    # Frozen layers at the beginning have no backward.
    frozen = min(num_frozen_layers(profile), len(layers) - 1)
    forward = [layer.forward_s for layer in layers]
    forward[-1] += profile.loss_s
    backward = [layer.backward_s for layer in layers]
    backward[:frozen] = [0.0] * frozen
    both = list(map(add, forward, backward))
    shares = [own / whole for own, whole in zip(forward, both, strict=True) if whole]
    weight_bytes, wgrad_bytes = profile.weights_of(range(len(layers)))
    return _Totals(
        work_s=sum(both),
        replayed_s=sum(layer.forward_s for layer in layers[frozen:]),
        forward_share=max(shares, default=0.0),
        step_s=profile.optimizer_of(range(len(layers))),
        is_frozen=frozen > 0,
        cut_bytes=min(profile.cut_bytes, default=0.0),
        weight_bytes=weight_bytes,
        wgrad_bytes=wgrad_bytes,
        saved_bytes=sum(layer.saved_bytes for layer in layers),
    )


def quick_bytes(problem: Problem, config: Config) -> float:
    """Bytes that some rank needs at least, for any cut of the layers."""
    total = _totals(problem, config)
    is_replayed = config.recompute in ("stage", "some")
    kept = 0.0
    if not is_replayed:
        kept = total.saved_bytes
    if min(least_in_flight(config)) == config.per_pipeline > 1:
        # At least the inputs of each of a rank's stages, of every micro-batch.
        kept = max(kept, total.cut_bytes * config.num_stages)
    needs = []
    for fixed, ranks in _room(problem, config):
        needs.append((kept + fixed) / ranks)
    if is_replayed and config.chunks == 1 and not config.replicas:
        # A backward needs all that its stage saves, of one micro-batch.
        needs.append((total.saved_bytes + _fixed_bytes(problem, config)) / config.depth)
    return max(needs)


def _fixed_bytes(problem: Problem, config: Config) -> float:
    """Bytes of weights, gradients and optimizer states of all ranks of a pipeline."""
    total = _totals(problem, config)
    versions = 1
    if find(config.schedule).weights is WeightRule.DOUBLE:
        versions = 2
    if config.chunks > 1 or problem.of(config).knows_work:
        # When the most is held, there may be no gradients yet.
        versions -= 1
    weight_bytes = total.weight_bytes
    if config.shares_weights:
        weight_bytes /= config.data
    return weight_bytes + total.wgrad_bytes * (versions + problem.state_of(config))


def _room(problem: Problem, config: Config) -> list[tuple[float, float]]:
    """Pairs (x, y): what the ranks keep of one micro-batch, in sum, and x are at most y times the memory of one.

    Rank r keeps k(r) micro-batches. The largest of its bytes over all r is at least any weighted mean of them: with
    the weights 1 and 1/k(r).
    """
    fixed = _fixed_bytes(problem, config)
    each = [1 / count for count in least_in_flight(config)]
    return [(fixed, config.depth), (fixed * min(each), sum(each))]
