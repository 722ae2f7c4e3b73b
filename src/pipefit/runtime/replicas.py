"""Comparison of the weights of replicas, which take the same steps and so stay the same bit for bit.

    every process    checksums of its tensors ─► one of each replicated stage ─► all processes
    two differ       those of the stage's tensors ─► all processes ─► an error on all that names the first one

A replica that differs would train on, and its numbers would be in every sum of gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pipefit.errors import DisagreementError
from pipefit.ir.program import Header
from pipefit.parallel.alike import content_sum, differences
from pipefit.runtime.collectives import exchange
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker


def verify_replicas(session: Session, workers: Sequence[Worker], header: Header, num_updates: int) -> None:
    """Compares the weights of the replicas of each stage, between two steps. Every rank must call it.

    Args:
        session: of the run.
        workers: of this process.
        header: of the run's programs; replicas that share their weights have nothing to compare.
        num_updates: of the training.

    Raises:
        DisagreementError: on every rank with the same message: two replicas differ.
    """
    replicated = []
    for stage, ranks in enumerate(header.placement):
        if len(ranks) > 1 and not header.shares_weights(stage):
            replicated.append(stage)
    if not session.is_distributed or not replicated:
        return
    (worker,) = workers
    own = {_name(worker, stage): _checksums(worker, stage) for stage in replicated if stage in worker.stages}
    found = exchange(session, {name: zlib.crc32(str(sums).encode()) for name, sums in own.items()})
    for name in dict.fromkeys(name for sums in found for name in sums):
        if len({sums[name] for sums in found if name in sums}) > 1:
            _refuse(name, exchange(session, own.get(name)), num_updates)


def _name(worker: Worker, stage: int) -> str:
    """The stage, or the part of it that the same process of each tensor-parallel rank has."""
    if worker.mesh.tensor == 1:
        return f"stage {stage}"
    return f"stage {stage}, part {worker.mesh.index}"


def _checksums(worker: Worker, stage: int) -> dict[str, str]:
    """The checksum of each weight of a stage, by the user's name."""
    with worker.presence(stage):
        weights = worker.stages[stage].named_parameters()
        return {name: f"{content_sum(weight):08x}" for name, weight in weights}


def _refuse(name: str, sums: Sequence[dict[str, str] | None], num_updates: int) -> None:
    holders = {rank: own for rank, own in enumerate(sums) if own is not None}
    raise DisagreementError(
        f"after step {num_updates} the replicas of {name} have different weights: checksum of {differences(holders)}; "
        "code that changes weights on one rank only, or a fault of a memory or a device, has changed them: resume from "
        "a checkpoint before"
    )
