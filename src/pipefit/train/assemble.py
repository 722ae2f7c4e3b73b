"""From a proven program to what runs it: each rank's stages, weights, tiers and optimizers."""

from __future__ import annotations

import torch

from pipefit.ir.program import Program
from pipefit.runtime.engine import Engine
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Training, Worker
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer, split
from pipefit.train.committing import commit_every
from pipefit.train.divided import Divided
from pipefit.train.gather import forget_others
from pipefit.train.sharding import shard_optimizers
from pipefit.train.spilled import Spilled, spillings
from pipefit.train.ties import tied_parameters

__all__ = ["assemble"]


def assemble(
    program: Program,
    plan: Plan,
    divided: Divided,
    training: Training,
    session: Session,
    device: torch.device,
    spill: Spilled | None,
    model: object,
) -> Engine:
    """The workers of this process: one rank when ranks are processes, else all of them.

    A process that is one rank lets go of the layers that others have.

    Args:
        program: of a pass; it says which stages are a rank's and which are spilled.
        plan: what it was made from.
        divided: the layers of the whole model.
        training: loss, optimizer and the like.
        session: the ranks of the run.
        device: where this process computes.
        spill: where spilled stages live.
        model: what the user gave; it may say how its layers draw their weights.
    """
    header, mesh = program.header, divided.mesh
    layers: list[NamedLayer] = list(divided.layers)
    ranks = [mesh.rank_of(session.rank)] if session.is_distributed else list(range(header.num_ranks))
    ties = tied_parameters(layers, plan.partition)
    parts = split(layers, plan.partition, [header.stages_of(rank) for rank in ranks])
    kept = spillings(ranks, parts, program, training, ties, device, spill, model, session, plan.partition, layers)
    for spilling in kept:
        if spilling is not None:
            spilling.commit_every = commit_every(spill, header, layers, plan.partition, training.optimizer)
    workers = [
        Worker.create(rank, training, part, ties, device, spilling)
        for rank, part, spilling in zip(ranks, parts, kept, strict=True)
    ]
    shard_optimizers(workers, plan)
    for worker in workers:
        worker.mesh = mesh
    if session.is_distributed:
        forget_others(layers, {layer.index for part in parts for own in part.values() for layer in own})
    return Engine(workers, header.num_stages, session, device)
