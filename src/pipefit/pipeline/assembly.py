"""Assembly of a verified program: each rank's stages, weights, tiers and optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.ir.program import Header, Program
from pipefit.parallel.mesh import Mesh, release
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.pipeline.resume import agree_on_step, identified
from pipefit.runtime.collectives import from_first
from pipefit.runtime.engine import Engine
from pipefit.runtime.outliving import processes_here
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition, Plan
from pipefit.spec.options import Spilled
from pipefit.spill.rank import RankStages, Spilling
from pipefit.spill.tier_file import new_run
from pipefit.stage.materialise import InitialiseLayer, forget_others, give_back, is_meta, materialise, stand_in
from pipefit.stage.split import NamedLayer, split
from pipefit.stage.ties import tied_parameters
from pipefit.stage.training import MakeOptimizer, Tie, Training

MOST_BYTES = 64 << 20
"""Maximum bytes of resident tensors that are committed with each step."""
_SELDOM = 10
"""Steps between two commits where a commit writes more than a step."""


def assemble(
    program: Program,
    plan: Plan,
    layers: Sequence[NamedLayer],
    mesh: Mesh,
    training: Training,
    session: Session,
    device: torch.device,
    initialise: InitialiseLayer | None,
    spill: Spilled | None,
) -> Engine:
    """The workers of this process: one rank when ranks are processes, else all of them.

    A process that is one rank frees the layers that others have.

    Args:
        program: of a pass, with the stages of each rank and the spilled ones.
        plan: of the program.
        layers: of the whole model, sharded.
        mesh: over which they are sharded.
        training: loss, optimizer and the like.
        session: the ranks of the run.
        device: of this process.
        initialise: the model's own function to draw a layer's weights, if it has one.
        spill: the user's options of spilling; None: to the host's memory, where the plan spills.
    """
    header = program.header
    if mesh.region is not None and is_meta(layers) and not session.is_rehearsal:
        if initialise is None or not hasattr(initialise, "over"):
            raise ModelError(
                "weights of the meta device are drawn layer by layer, which tensor parallelism cannot do: build the "
                "model in memory, or use tensor=1"
            )
        initialise = initialise.over(mesh)
    if spill is not None:
        spill = identified(spill, layers, plan, training, session)
    if session.is_distributed:
        ranks = [mesh.rank_of(session.rank)]
    else:
        ranks = list(range(header.num_ranks))
    ties = tied_parameters(layers, plan.partition)
    parts = split(layers, plan.partition, [header.stages_of(rank) for rank in ranks])
    spillings: list[Spilling | None] = []
    if header.spill is not None:
        run = from_first(session, new_run)
    else:
        run = ""
    for rank, part in zip(ranks, parts, strict=True):
        if initialise and getattr(initialise, "is_complete", False) and any(map(header.is_spilled, part)):
            _read_shared(part, _shared(part, ties), device, initialise)
        stages = RankStages(rank, part, _shared(part, ties), initialise, run)
        spillings.append(None)
        if any(map(header.is_spilled, part)):
            where = spill or Spilled()
            if where.host_bytes is not None:
                share = _host_share(rank, header, plan.partition, layers, session)
                where = replace(where, host_memory=max(where.host_bytes * share, 1))
            spillings[-1] = Spilling.create(stages, program, training, device, where)
        staying = [layer for stage, own in part.items() if not header.is_spilled(stage) for layer in own]
        if not session.is_rehearsal:
            materialise(staying, training.seed, device, initialise)
    if spill is not None and spill.resume is not False:
        agree_on_step(session, spillings)
    interval = _commit_every(spill, header, layers, plan.partition, training.optimizer)
    workers = []
    for rank, part, spilling in zip(ranks, parts, spillings, strict=True):
        if spilling is not None:
            spilling.commit_every = interval
        of_stage = {stage: plan.placement.ranks[stage] for stage in part if plan.sharded_optimizer}
        shards = {stage: (of.index(rank), len(of)) for stage, of in of_stage.items() if len(of) > 1}
        workers.append(Worker.create(rank, training, part, ties, device, spilling, mesh, shards))
        for index, stage in workers[-1].stages.items():
            stage.replay(plan.partition.stages[index].replays, len(layers))
            if len(plan.placement.ranks[index]) > 1:
                stage.replicate()
    # Only a model that every process held whole can be given back to all of them.
    whole = session.is_distributed and not (mesh.region or plan.spill or is_meta(layers))
    if session.is_distributed:
        forget_others(layers, {layer.index for part in parts for own in part.values() for layer in own})
    engine = Engine(workers, header.num_stages, session, device)
    engine.took_whole = whole
    return engine


def _read_shared(
    part: dict[int, list[NamedLayer]], shared: set[int], device: torch.device, initialise: InitialiseLayer
) -> None:
    """Gives memory and weights to shared parameters of the meta device, which stay on the device and stay tied."""
    every = [layer for own in part.values() for layer in own]
    found = [layer for layer in every if any(p.is_meta and id(p) in shared for p in layer.module.parameters())]
    stand_in(every, lambda t: torch.empty_like(t, device=device), lambda t: t.is_meta and id(t) in shared)
    for layer in found:
        initialise(layer.prefix, layer.module)


def end_run(workers: Sequence[Worker], finished: bool) -> None:
    """Ends a run after its last save: removes its records, unless it was stopped before its last step."""
    for worker in workers:
        if worker.spilling is not None:
            worker.spilling.settle()
            worker.spilling.tier.close(discard=finished)


def release_run(engine: Engine, layers: Sequence[NamedLayer], whole: Callable[[], dict[str, Tensor]]) -> None:
    """Restores a model for the user: all its weights if they were there, own memory for them.

    Args:
        engine: of the run.
        layers: of the whole model.
        whole: returns the state of the whole model; every process calls it.
    """
    if engine.took_whole:
        give_back(layers, whole())
        engine.took_whole = False
    release(engine.mesh)
    for worker in engine.workers:
        if worker.spilling:
            worker.spilling.tier.close()
        for store in worker.stores.values():
            store.release()


def _host_share(
    rank: int, header: Header, partition: Partition, whole: Sequence[NamedLayer], session: Session
) -> float:
    """A rank's share of the host's memory: its share of the weights that the ranks of its machine spill."""

    def spilled_bytes(of: int) -> int:
        stages = [stage for stage in header.stages_of(of) if header.is_spilled(stage)]
        layers = [whole[layer].module for stage in stages for layer in partition.stages[stage].layers]
        return sum(p.nbytes for p in {id(p): p for layer in layers for p in layer.parameters()}.values())

    # The processes of a tensor-parallel rank have a part of its weights each.
    if session.is_distributed:
        processes = processes_here(session)
    else:
        processes = range(header.num_ranks)
    total = sum(spilled_bytes(process // header.tensor) for process in processes)
    if total:
        return spilled_bytes(rank) / total
    return 1.0


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
    """Steps from one commit to the next; the same on all ranks, because it follows from the whole model."""
    if spill is None or spill.folder is None:
        return 1
    if spill.commit_every is not None:
        return spill.commit_every
    is_much = spill.host_bytes is not None or _staying_bytes(header, layers, partition, optimizer) > MOST_BYTES
    return _SELDOM if is_much else 1


def _staying_bytes(
    header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> float:
    """Bytes of the weights and states that stay on the devices, where they are known before the first step."""
    of_stage = [(stage, layers[index]) for stage, part in enumerate(partition.stages) for index in part.layers]
    users = Counter(id(p) for _, layer in of_stage for p in layer.module.parameters())
    staying = {
        id(p): p.nbytes
        for stage, layer in of_stage
        for p in layer.module.parameters()
        if not header.is_spilled(stage) or users[id(p)] > 1
    }
    stepping = [layer for stage, layer in of_stage if header.keeps_states(stage) or not header.is_spilled(stage)]
    weights = {id(p): p.nbytes for layer in stepping for p in layer.module.parameters()}
    return sum(staying.values()) + sum(weights.values()) * state_per_weight(stepping, optimizer)
