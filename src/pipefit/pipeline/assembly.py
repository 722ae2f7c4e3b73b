"""Assembly of a verified program: each rank's stages, weights, tiers and optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from pipefit.cutting import watch_shared
from pipefit.errors import ModelError
from pipefit.ir.instruction import Indices
from pipefit.ir.program import Header, Program
from pipefit.parallel.mesh import Mesh, make_mesh, release, shard_layers
from pipefit.pipeline.given_model import GivenModel
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.pipeline.resume import agree_on_step, identified
from pipefit.profiling.tensors import num_bytes, parameters_of
from pipefit.runtime.collectives import from_first
from pipefit.runtime.engine import Engine
from pipefit.runtime.outliving import processes_here
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Stepped, Worker, layers_of
from pipefit.spec import Partition, Plan
from pipefit.spec.options import Spilled
from pipefit.spill.rank import RankStages, Spilling, open_tier
from pipefit.spill.tier_file import new_run
from pipefit.stage.accelerator import forget_peak
from pipefit.stage.materialise import InitialiseLayer, forget_others, is_meta, materialise, stand_in
from pipefit.stage.split import NamedLayer, split
from pipefit.stage.ties import shared_parameters, tied_parameters
from pipefit.stage.training import MakeOptimizer, Tie, Training

MOST_BYTES = 64 << 20
"""Maximum bytes of resident tensors that are committed with each step."""
_SELDOM = 10
"""Steps between two commits where a commit writes more than a step."""


def mesh_of(plan: Plan, session: Session) -> Mesh:
    """The processes of a plan, each in its place among those that share a rank."""
    num_ranks = plan.placement.num_ranks
    return make_mesh(num_ranks, plan.tensor, session.rank, session.num_ranks, plan.sequence_parallel)


def sharded_mesh(plan: Plan, layers: Sequence[NamedLayer], session: Session) -> Mesh:
    """The processes of a plan, over which layers are then sharded."""
    mesh = mesh_of(plan, session)
    shard_layers(layers, mesh)
    return mesh


def is_lent_whole(program: Program, layers: Sequence[NamedLayer], session: Session) -> bool:
    """Returns whether every process has the whole model before `assemble`, so that `close` can give it back to all."""
    header = program.header
    return session.is_distributed and header.tensor == 1 and header.spill is None and not is_meta(layers)


def assemble(
    program: Program,
    plan: Plan,
    given: GivenModel,
    mesh: Mesh,
    training: Training,
    session: Session,
    spill: Spilled | None,
) -> Engine:
    """The workers of this process: one rank when ranks are processes, else all of them.

    A process that is one rank frees the layers that others have.

    Args:
        program: of a pass, with the stages of each rank and the spilled ones.
        plan: of the program.
        given: the model, whose layers are sharded.
        mesh: over which they are sharded.
        training: loss, optimizer and the like.
        session: the ranks of the run.
        spill: the user's options of spilling; None: to the host's memory, where the plan spills.
    """
    header = program.header
    layers = given.work.layers
    device = given.work.device
    initialise = given.initialise
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
    if not session.is_rehearsal and not getattr(initialise, "is_complete", False):
        _check_drawn_once(layers, ties)
    parts = split(layers, plan.partition, [header.stages_of(rank) for rank in ranks])
    spillings: list[Spilling | None] = []
    if header.spill is not None:
        run = from_first(session, new_run)
    else:
        run = ""
    for rank, part in zip(ranks, parts, strict=True):
        if initialise and getattr(initialise, "is_complete", False) and any(map(header.is_spilled, part)):
            _read_shared(part, shared_parameters(part, ties), device, initialise)
        spillings.append(None)
        if header.spill is not None and any(map(header.is_spilled, part)):
            where = spill or Spilled()
            if where.host_bytes is not None:
                share = _host_share(rank, header, plan.partition, layers, session)
                where = replace(where, host_memory=max(where.host_bytes * share, 1))
            stages = RankStages(rank, part, ties, initialise)
            opening = partial(open_tier, rank, header.spill, where, device, run)
            spillings[-1] = Spilling.create(stages, program, training, device, opening, where)
    if spill is not None and spill.resume is not False:
        agree_on_step(session, spillings)
    interval = _commit_every(spill, header, layers, plan.partition, training.optimizer)
    workers = []
    for rank, part, spilling in zip(ranks, parts, spillings, strict=True):
        if spilling is not None:
            spilling.commit_every = interval
        fill = None
        if not session.is_rehearsal:
            fill = partial(materialise, seed=training.seed, device=device, own=initialise, whole=layers, made={})
        workers.append(worker_of(rank, part, plan, ties, training, device, spilling, mesh, fill))
    release_others(workers, plan, given, session)
    forget_peak(device)
    return Engine(workers, header.num_stages, session, device)


def _check_drawn_once(layers: Sequence[NamedLayer], ties: Mapping[str, Tie]) -> None:
    """Refuses tied weights of the meta device: each layer draws its own weights.

    Raises:
        ModelError: stages share one.
    """
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
            if parameter.is_meta and name in ties:
                raise ModelError(
                    f"{name} is a weight of several stages, on the meta device, where each layer draws its own "
                    "weights: build the model in memory, untie them, or put the layers into one stage"
                )


def worker_of(
    rank: int,
    part: dict[int, list[NamedLayer]],
    plan: Plan,
    ties: dict[str, Tie],
    training: Training,
    device: torch.device,
    spilling: Spilling | None = None,
    mesh: Mesh | None = None,
    fill: Callable[[Sequence[NamedLayer]], None] | None = None,
    kept: Mapping[Indices, Stepped] = MappingProxyType({}),
) -> Worker:
    """The worker of a rank of a plan.

    Args:
        rank: its number.
        part: the layers of its stages.
        plan: of all ranks.
        ties: all tied parameters of the model.
        training: loss, optimizer and the like.
        device: of the rank.
        spilling: of its spilled stages.
        mesh: the processes that share the rank.
        fill: gives the layers of a stage their weights; see `Worker.create`.
        kept: what steps weights that this process has stepped before; see `Worker.create`.
    """
    replicas = {stage: plan.placement.ranks[stage] for stage in part}
    shards = {}
    if plan.shard != "none":
        shards = {stage: (of.index(rank), len(of)) for stage, of in replicas.items() if len(of) > 1}
    worker = Worker.create(rank, training, part, ties, device, spilling, mesh, shards, plan.shard, fill, kept)
    for index, own in worker.stages.items():
        own.replay(plan.partition.stages[index].replays, plan.partition.num_layers)
        if len(replicas[index]) > 1:
            own.replicate()
    return worker


def release_others(workers: Sequence[Worker], plan: Plan, given: GivenModel, session: Session) -> None:
    """Frees the layers that no worker of this process has, and watches what layers of several stages share."""
    layers = given.work.layers
    if session.is_distributed:
        forget_others(layers, {layer.index for layer in layers_of(workers)})
    if not given.is_proved:
        watch_shared(layers, given.work.loss, plan.partition, [worker.stages for worker in workers])


def _read_shared(
    part: dict[int, list[NamedLayer]], shared: set[int], device: torch.device, initialise: InitialiseLayer
) -> None:
    """Gives memory and weights to shared parameters of the meta device, which stay on the device and stay tied."""

    def waits(tensor: Tensor) -> bool:
        return tensor.is_meta and id(tensor) in shared

    every = [layer for own in part.values() for layer in own]
    waiting = [layer for layer in every if any(map(waits, layer.module.parameters()))]
    stand_in(every, lambda t: torch.empty_like(t, device=device), waits)
    for layer in waiting:
        initialise(layer.prefix, layer.module)


def end_run(workers: Sequence[Worker], finished: bool) -> None:
    """Ends a run after its last save: removes its records, unless it was stopped before its last step."""
    for worker in workers:
        if worker.spilling is not None:
            worker.spilling.settle()
            worker.spilling.tier.close(discard=finished)


def release_run(engine: Engine, header: Header) -> None:
    """Closes the tiers of a run, and gives the weights of its model memory of their own; they may stay in parts."""
    release(engine.mesh)
    for worker in engine.workers:
        if worker.spilling:
            worker.spilling.close()
        worker.let_go()
    is_in_parts = header.tensor > 1 or header.spill is not None or header.shard == "weights"
    engine.has_weights = not is_in_parts


def _host_share(
    rank: int, header: Header, partition: Partition, whole: Sequence[NamedLayer], session: Session
) -> float:
    """A rank's share of the host's memory: its share of the weights that the ranks of its machine spill."""

    def spilled_bytes(of: int) -> int:
        stages = [stage for stage in header.stages_of(of) if header.is_spilled(stage)]
        layers = [whole[layer] for stage in stages for layer in partition.stages[stage].layers]
        return num_bytes(parameters_of(layers))

    # The processes of a tensor-parallel rank have a part of its weights each.
    if session.is_distributed:
        processes = processes_here(session)
    else:
        processes = range(header.num_ranks)
    total = sum(spilled_bytes(process // header.tensor) for process in processes)
    if total:
        return spilled_bytes(rank) / total
    return 1.0


def _commit_every(
    spill: Spilled | None, header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> int:
    """Steps from one commit to the next; the same on all ranks, because it follows from the whole model."""
    if spill is None or spill.folder is None:
        return 1
    if spill.commit_every is not None:
        return spill.commit_every
    if spill.host_bytes is not None or _staying_bytes(header, layers, partition, optimizer) > MOST_BYTES:
        return _SELDOM
    return 1


def _staying_bytes(
    header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> float:
    """Bytes of the weights and states that stay on the devices, where they are known before the first step."""
    users = Counter(id(p) for layer in layers for p in layer.module.parameters())
    staying = {id(p): p for layer in layers for p in layer.module.parameters() if users[id(p)] > 1}
    stepping = []
    for stage, part in enumerate(partition.stages):
        own = [layers[index] for index in part.layers]
        is_spilled = header.is_spilled(stage)
        if not is_spilled:
            staying |= {id(p): p for p in parameters_of(own)}
        if header.keeps_states(stage) or not is_spilled:
            stepping += own
    states = num_bytes(parameters_of(stepping)) * state_per_weight(stepping, optimizer)
    return num_bytes(staying.values()) + states
