"""From a proven program to what runs it: each rank's stages, weights, tiers and optimizers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipefit.checkpoint.committed import MOST_BYTES
from pipefit.ir.program import Header, Program
from pipefit.parallel.sharded_weights import ShardedStore, shard
from pipefit.pipeline.full_state import forget_others
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.pipeline.resume import agree_on_step
from pipefit.pipeline.tensor_parallel import TensorParallel
from pipefit.runtime.engine import Engine
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition, Plan
from pipefit.spec.options import Spilled
from pipefit.spill.create import RankStages, create_spilling
from pipefit.spill.rank import Spilling, SpillPlace
from pipefit.stage.materialise import is_meta, materialise
from pipefit.stage.split import NamedLayer, split
from pipefit.stage.ties import tied_parameters
from pipefit.stage.training import MakeOptimizer, Tie, Training

_SELDOM = 10
"""Steps between two commits where these write more than the steps do."""


def assemble(
    program: Program,
    plan: Plan,
    tensor: TensorParallel,
    training: Training,
    session: Session,
    device: torch.device,
    model: object,
    spill: Spilled | None,
    place: SpillPlace | None,
) -> Engine:
    """The workers of this process: one rank when ranks are processes, else all of them.

    A process that is one rank frees the layers that others have.

    Args:
        program: of a pass; it says which stages are a rank's and which are spilled.
        plan: of the program.
        tensor: the layers of the whole model, sharded.
        training: loss, optimizer and the like.
        session: the ranks of the run.
        device: where this process computes.
        model: of the user; it may know how its layers draw their weights.
        spill: how stages spill, as the user asked for it.
        place: where spilled stages live; None: in the host's memory.
    """
    header, mesh = program.header, tensor.mesh
    layers: list[NamedLayer] = list(tensor.layers)
    ranks = [mesh.rank_of(session.rank)] if session.is_distributed else list(range(header.num_ranks))
    ties = tied_parameters(layers, plan.partition)
    parts = split(layers, plan.partition, [header.stages_of(rank) for rank in ranks])
    spillings: list[Spilling | None] = []
    for rank, part in zip(ranks, parts, strict=True):
        stages = RankStages(rank, part, _shared(part, ties), getattr(model, "initialise_layer", None))
        where = _with_share(place or SpillPlace(), rank, header, plan.partition, layers, session)
        is_spilled = any(header.is_spilled(stage) for stage in part)
        spillings.append(create_spilling(stages, program, training, device, where) if is_spilled else None)
        _draw_resident(stages, header, training.seed, device)
    if spill is not None and spill.resume is not False:
        agree_on_step(session, spillings)
    interval = _commit_every(spill, header, layers, plan.partition, training.optimizer)
    workers = []
    for rank, part, spilling in zip(ranks, parts, spillings, strict=True):
        if spilling is not None:
            spilling.commit_every = interval
        workers.append(Worker.create(rank, training, part, ties, device, spilling))
    _shard_optimizers(workers, plan)
    for worker in workers:
        worker.mesh = mesh
    if session.is_distributed:
        forget_others(layers, {layer.index for part in parts for own in part.values() for layer in own})
    return Engine(workers, header.num_stages, session, device)


def end_run(workers: Sequence[Worker], finished: bool) -> None:
    """Ends a run that has saved what it wanted: its records go, if it was not stopped before its last step."""
    for worker in workers:
        if worker.spilling is not None:
            worker.spilling.settle()
            worker.spilling.close(discard=finished)


def release(workers: Sequence[Worker]) -> None:
    """Gives the stages of some workers back to their user: own memory for weights, own classes for batch norms."""
    for worker in workers:
        if worker.spilling:
            worker.spilling.close()
        for stage in worker.stages.values():
            stage.release()
        for store in worker.stores.values():
            if isinstance(store, ShardedStore):
                store.release()


def _draw_resident(stages: RankStages, header: Header, seed: int, device: torch.device) -> None:
    """Gives the layers of the meta device whose stages stay on the device their memory and weights."""
    for stage, layers in stages.layers.items():
        if not header.is_spilled(stage) and is_meta(layers):
            materialise(layers, seed, device, stages.initialise)


def _with_share(
    place: SpillPlace,
    rank: int,
    header: Header,
    partition: Partition,
    whole: Sequence[NamedLayer],
    session: Session,
) -> SpillPlace:
    """The place of a rank's spilled stages, with its share of the host's memory, if that is limited."""
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


def _commit_every(
    spill: Spilled | None, header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> int:
    """Steps from one commit to the next; the same on all ranks, for it follows from the whole model."""
    if spill is None or spill.folder is None:
        return 1
    if spill.commit_every is not None:
        return spill.commit_every
    if spill.host_bytes is not None:
        return _SELDOM
    return _SELDOM if _staying_bytes(header, layers, partition, optimizer) > MOST_BYTES else 1


def _staying_bytes(
    header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> float:
    """Bytes of the weights and states that stay on the devices, as far as they are known before the first step."""
    users = Counter(id(p) for layer in layers for p in layer.module.parameters())
    passed: set[int] = set()
    staying = 0.0
    stepping: list[NamedLayer] = []
    for stage, part in enumerate(partition.stages):
        for layer in (layers[index] for index in part.layers):
            for parameter in layer.module.parameters():
                stays = not header.is_spilled(stage) or users[id(parameter)] > 1
                if stays and id(parameter) not in passed:
                    staying += parameter.nbytes
                passed.add(id(parameter))
            if header.keeps_states(stage) or not header.is_spilled(stage):
                stepping.append(layer)
    weights = sum({id(p): p.nbytes for layer in stepping for p in layer.module.parameters()}.values())
    return staying + weights * state_per_weight(stepping, optimizer)


def _shard_optimizers(workers: Sequence[Worker], plan: Plan) -> None:
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
