"""Candidates whose copies share gradients or weights: those to try where less sharing does not fit, and their bounds.

With the same stages, sharing more moves at least as many bytes, so a level is tried for candidates that do not fit at
the one before. Gradients of one stage are whole at a time, and weights of `SHARD_SLOTS`: with no more stages than these
nothing is saved. Of the orders that have more, those are tried that visit a stage for all micro-batches together, and
on ranks that hold the whole model also those that take one micro-batch after the other; between ranks these would
gather a stage again for every group of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipefit.cost import CostModel
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op, Reduction
from pipefit.planner.holdings import holds_all
from pipefit.planner.space import Config, Space, placement_for, positions
from pipefit.schedules import find
from pipefit.spec.plan import SHARD_SLOTS, Shard

_LEAST_CHUNKS: dict[Shard | None, int] = {"gradients": 2, "weights": SHARD_SLOTS + 1}
"""Stages on each rank from which on a level saves memory."""


def sharing_more(space: Space, config: Config, num_layers: int) -> Iterator[Config]:
    """The candidates to try where one does not fit: the next level, then more chunks.

    Data parallelism, which has one stage, becomes several stages on every rank.
    """
    is_alike = not (config.shares or config.replicas or config.partitioner == "links")
    if config.data == 1 or not is_alike:
        return
    following = space.next_shard.get(config.shard)
    least = _LEAST_CHUNKS.get(following, 1)
    if config.num_stages == 1 and following is not None:
        able = [count for count in space.chunks if least <= count <= num_layers]
        for name, count in product(space.schedules, able):
            order = find(name)
            if order.chunks and order.layout == "loop":
                yield replace(config, schedule=name, chunks=count, shard=following)
    gathers_seldom = config.depth == 1 or holds_all(config)
    if config.chunks == 1 or not gathers_seldom:
        return
    if following is not None and config.chunks >= least:
        yield replace(config, shard=following)
    if following is None and config.shares_gradients and space.more_chunks and config.chunks >= max(space.chunks):
        if 2 * config.num_stages <= num_layers:
            yield replace(config, chunks=2 * config.chunks, shard=space.next_shard.get("optimizer", config.shard))


def shared_s(config: Config, cost: CostModel, frozen: int) -> list[float]:
    """Of each rank the seconds of its gathers and sums, which go one at a time.

    Every stage is gathered and summed once. Where all forwards come before all backwards, all stages but those that
    have room then are gathered again.
    """
    ranks = placement_for(config).ranks
    gathers_s: list[list[float]] = [[] for _ in range(config.depth)]
    found = [0.0] * config.depth
    for stage, rank in enumerate(positions(config)):
        gather = Instruction(Op.REDUCE, stage, version=0, kind=Reduction.SHARDS.value)
        if config.shares_weights:
            gather = Instruction(Op.UNSHARD, stage, version=0)
        gathers_s[rank].append(cost.reduce_s(gather, ranks[stage]))
        found[rank] += gathers_s[rank][-1]
        if stage >= frozen:
            scatter = Instruction(Op.REDUCE, stage, version=0, kind=Reduction.SCATTER.value)
            found[rank] += cost.reduce_s(scatter, ranks[stage])
    if config.shares_weights and holds_all(config) and not frozen:
        for rank, each_s in enumerate(gathers_s):
            again = max(len(each_s) - SHARD_SLOTS, 0)
            found[rank] += sum(sorted(each_s)[:again])
    return found
