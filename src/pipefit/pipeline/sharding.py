"""Optimizers divided over the replicas of each stage."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipefit.errors import PlanError
from pipefit.parallel.sharded_weights import ShardedStore, shard
from pipefit.runtime.worker import Worker
from pipefit.spec import Plan

__all__ = ["release_flat", "shard_optimizers", "with_sharding"]


def with_sharding(plan: Plan, asked: bool) -> Plan:
    """The plan with a sharded optimizer where one is asked for, by the user or by the plan itself.

    Raises:
        PlanError: no stage has a second replica, so there is nothing to divide it over.
    """
    sharded = asked or plan.sharded_optimizer
    if sharded and all(len(ranks) == 1 for ranks in plan.placement.ranks):
        raise PlanError(
            "a sharded optimizer is divided over the replicas of a stage, but every stage is on one rank only (d = 1); "
            "replicate the stages (replicas=2, or schedule data-parallel), or do not shard the optimizer"
        )
    return msgspec.structs.replace(plan, sharded_optimizer=sharded)


def shard_optimizers(workers: Sequence[Worker], plan: Plan) -> None:
    """Gives each replicated stage weights in flat buckets and an optimizer of this replica's part of them.

    Raises:
        PlanError: an optimizer cannot be divided.
    """
    if not plan.sharded_optimizer:
        return
    for worker in workers:
        for stage, before in list(worker.stores.items()):
            ranks = plan.placement.ranks[stage]
            if len(ranks) > 1:
                owned = worker.owned[stage]
                store = ShardedStore(
                    [own.parameter for own in owned],
                    [own.tie is not None for own in owned],
                    ranks.index(worker.rank),
                    len(ranks),
                )
                if stage in worker.optimizers:
                    shard(worker.optimizers[stage], store, before.masters)
                worker.stores[stage] = store


def release_flat(worker: Worker) -> None:
    """Gives the weights of sharded stages memory of their own again."""
    for store in worker.stores.values():
        if isinstance(store, ShardedStore):
            store.release()
