"""Candidates whose copies share gradients or weights, which are tried where less sharing does not fit.

Sharing more moves at least as many bytes, so a level is not tried where the one before it fits. A rank has room for
`SHARD_SLOTS` whole stages: with no more stages than these nothing is saved. Of the orders that have more, those are
tried that visit a stage for all micro-batches together, and on ranks that hold the whole model also those that take one
micro-batch after the other; between ranks these would gather a stage again for every group of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipefit.planner.holdings import holds_all
from pipefit.planner.space import Config, Space
from pipefit.schedules import find
from pipefit.spec.plan import SHARD_SLOTS


def sharing_more(space: Space, config: Config, num_layers: int) -> Iterator[Config]:
    """The candidates to try where one does not fit: the next level, then more chunks.

    Data parallelism, which has one stage, becomes several stages on every rank.
    """
    is_alike = not (config.shares or config.replicas or config.partitioner == "links")
    if config.data == 1 or not is_alike:
        return
    following = space.next_shard.get(config.shard)
    if config.num_stages == 1 and following is not None:
        able = [count for count in space.chunks if SHARD_SLOTS < count <= num_layers]
        for name, count in product(space.schedules, able):
            order = find(name)
            if order.chunks and order.layout == "loop":
                yield replace(config, schedule=name, chunks=count, shard=following)
    if config.chunks <= SHARD_SLOTS or not _gathers_seldom(config):
        return
    if following is not None:
        yield replace(config, shard=following)
    elif config.shares_gradients and space.more_chunks and config.chunks >= max(space.chunks):
        if 2 * config.num_stages <= num_layers:
            yield replace(config, chunks=2 * config.chunks, shard=space.next_shard.get("optimizer", config.shard))


def _gathers_seldom(config: Config) -> bool:
    return config.depth == 1 or holds_all(config)
