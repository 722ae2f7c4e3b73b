"""Optimizers divided over the replicas of each stage."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import PlanError
from pipefit.parallel.sharded import ShardedStore, shard
from pipefit.runtime.worker import Worker
from pipefit.spec import Plan

__all__ = ["check_sharding", "release_flat", "shard_optimizers"]


def check_sharding(plan: Plan) -> None:
    """Refuses a sharded optimizer where there is nothing to divide it over.

    Raises:
        PlanError: no stage has a second replica.
    """
    if plan.sharded_optimizer and all(len(ranks) == 1 for ranks in plan.placement.ranks):
        raise PlanError(
            "a sharded optimizer is divided over the replicas of a stage, but every stage is on one rank only (d = 1); "
            "replicate the stages (replicas=2, or schedule data-parallel), or do not shard the optimizer"
        )


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
                worker.stores[stage] = store  # type: ignore[assignment]


def release_flat(worker: Worker) -> None:
    """Gives the weights of sharded stages memory of their own again."""
    for store in worker.stores.values():
        if isinstance(store, ShardedStore):
            store.release()
