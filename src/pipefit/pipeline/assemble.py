"""From a proven program to what runs it: each rank's stages, weights, tiers and optimizers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipefit.ir.program import Header, Program
from pipefit.pipeline.committing import commit_every
from pipefit.pipeline.divided import Divided
from pipefit.pipeline.gather import forget_others
from pipefit.pipeline.resumed import agree_on_step
from pipefit.pipeline.sharding import shard_optimizers
from pipefit.pipeline.spill_options import Spilled
from pipefit.runtime.engine import Engine
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition, Plan
from pipefit.spill.create import RankStages, create_spilling
from pipefit.spill.rank import Spilling, SpillPlace
from pipefit.stage.materialise import is_meta, materialise
from pipefit.stage.split import NamedLayer, split
from pipefit.stage.ties import tied_parameters
from pipefit.stage.training import Tie, Training

__all__ = ["assemble", "let_go"]


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
    spillings: list[Spilling | None] = []
    for rank, part in zip(ranks, parts, strict=True):
        stages = RankStages(rank, part, _shared(part, ties), getattr(model, "initialise_layer", None))
        place = _place(rank, spill, header, plan.partition, layers, session)
        is_spilled = any(header.is_spilled(stage) for stage in part)
        spillings.append(create_spilling(stages, program, training, device, place) if is_spilled else None)
        _draw_resident(stages, header, training.seed, device)
    if spill is not None and spill.resume is not False:
        agree_on_step(session, spillings)
    every = commit_every(spill, header, layers, plan.partition, training.optimizer)
    workers = []
    for rank, part, spilling in zip(ranks, parts, spillings, strict=True):
        if spilling is not None:
            spilling.commit_every = every
        workers.append(Worker.create(rank, training, part, ties, device, spilling))
    shard_optimizers(workers, plan)
    for worker in workers:
        worker.mesh = mesh
    if session.is_distributed:
        forget_others(layers, {layer.index for part in parts for own in part.values() for layer in own})
    return Engine(workers, header.num_stages, session, device)


def let_go(workers: Sequence[Worker], finished: bool) -> None:
    """A run has ended and saved what it wanted: its records go, if it was not stopped before its last step."""
    for worker in workers:
        if worker.spilling is not None:
            worker.spilling.settle()
            worker.spilling.close(discard=finished)


def _draw_resident(stages: RankStages, header: Header, seed: int, device: torch.device) -> None:
    """Gives the layers of the meta device whose stages stay on the device their memory and weights."""
    for stage, layers in stages.layers.items():
        if not header.is_spilled(stage) and is_meta(layers):
            materialise(layers, seed, device, stages.initialise)


def _place(
    rank: int,
    spill: Spilled | None,
    header: Header,
    partition: Partition,
    whole: Sequence[NamedLayer],
    session: Session,
) -> SpillPlace:
    """Where the spilled stages of a rank live: in its share of the host's memory, if that is limited."""
    place = (spill or Spilled()).where
    if place.host_bytes is None or header.num_ranks == 1:
        return place
    share = _host_share(rank, header, partition, whole, session)
    return replace(place, host_bytes=int(place.host_bytes * share))


def _host_share(
    rank: int, header: Header, partition: Partition, whole: Sequence[NamedLayer], session: Session
) -> float:
    """A rank's share of the host's memory: its share of the weights that the ranks of its machine spill."""

    def spilled_bytes(of: int) -> int:
        stages = [stage for stage in header.stages_of(of) if header.is_spilled(stage)]
        layers = [whole[layer].module for stage in stages for layer in partition.stages[stage].layers]
        return sum(p.nbytes for p in {id(p): p for layer in layers for p in layer.parameters()}.values())

    first, count = 0, header.num_ranks
    if session.is_distributed:
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    total = sum(spilled_bytes(of) for of in range(first, first + count))
    return spilled_bytes(rank) / total if total else 1.0


def _shared(part: dict[int, list[NamedLayer]], ties: dict[str, Tie]) -> set[int]:
    """Parameters that stay on the device because several stages use them."""
    users: Counter[int] = Counter()
    tied: set[int] = set()
    for layers in part.values():
        users.update({id(p) for layer in layers for p in layer.module.parameters()})
        for layer in layers:
            tied.update(id(p) for name, p in layer.module.named_parameters(prefix=layer.prefix) if name in ties)
    return tied | {parameter for parameter, count in users.items() if count > 1}
