"""Another plan for a live pipeline, between two steps: layers that move are sent, everything else stays where it is.

prepare     the plan is compared among the processes, and its program proved; nothing has changed yet
move        layers that a process lacks get memory, and their state from one that has it
build       the stages of the new plan; a stage with the same weights keeps its optimizer and schedule as they are
follow      the pipeline takes the plan; layers that other processes have now are freed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.memory import Here, forget_newer, steps_in
from pipefit.checkpoint.moving import (
    WEIGHT,
    Belongings,
    Move,
    belongings_of,
    exchange_tensors,
    first_names,
    forms_of,
    is_state,
    moves_of,
    named_tensors,
    other_key,
)
from pipefit.checkpoint.optim import Read, by_parameter, optimization_of, read_of, restore_optimizer
from pipefit.checkpoint.restore import readers_of
from pipefit.checkpoint.state import tensors_of
from pipefit.errors import DisagreementError, ModelError, PipefitError, PlanError
from pipefit.ir.instruction import Indices
from pipefit.ir.program import Header
from pipefit.parallel.alike import differences
from pipefit.pipeline.assembly import release_others, worker_of
from pipefit.pipeline.facts import CURE, facts_of_plan
from pipefit.pipeline.programs import Programs
from pipefit.pipeline.repairable import why_fixed
from pipefit.pipeline.request import fitted
from pipefit.runtime.collectives import agree, attempt, exchange
from pipefit.runtime.progress import MEETING
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Stepped, Worker, layers_of
from pipefit.spec import Plan
from pipefit.spec.files import JsonObject
from pipefit.stage.accelerator import settle
from pipefit.stage.materialise import forget_others, give_memory
from pipefit.stage.split import NamedLayer, split
from pipefit.stage.ties import tied_parameters


class _Next(NamedTuple):
    """The plan that is being taken.

    Attributes:
        plan: with what it says about this model.
        programs: of the plan; the shortest is proved.
        ranks_of: those that each process will run.
        session: of the processes that will run it.
    """

    plan: Plan
    programs: Programs
    ranks_of: list[list[int]]
    session: Session


class _Moved(NamedTuple):
    """The state of a process after the moves.

    Attributes:
        first: each name of a weight or buffer, with its first name.
        everything: that this process has.
        arrived: of it, what other processes have sent.
        records: the numbers of all optimizers and schedules; of those about one weight, the last one counts.
        modes: for each layer, whether each of its modules is in training mode.
    """

    first: Mapping[str, str]
    everything: Belongings
    arrived: Belongings
    records: Sequence[Optimization]
    modes: Mapping[int, Sequence[bool]]


def rearrange(
    pipe: Any,
    plan: Plan,
    session: Session | None = None,
    proved: Programs | None = None,
    is_restored: bool = False,
) -> None:
    """Lets a pipeline go on by another plan, with the same numbers. Every process of the plan must call it.

    It is called between two steps of a synchronous schedule, also in a callback. A process keeps the tensors that it
    has, and gets the others from one that has them; so only the layers that move need memory twice. `pipe`, its state,
    the user's modules and the optimizers stay the same objects, and so does the learning-rate schedule of a stage whose
    weights stay together. What a module keeps in other attributes than parameters and buffers does not move.

    Args:
        pipe: that is trained.
        plan: for the processes of the session; its ranks are the session's.
        session: the processes from now on, among which this one may have another number; None: those of before.
        proved: programs of the plan that are known; None: they are made now.
        is_restored: all weights and states come from the copies of this step in memory, because copies of a stage
            share them. After an error the training is then lost.

    Raises:
        PlanError: the plan does not fit, or is one that a live pipeline cannot take; nothing has changed.
        DisagreementError: the processes have different plans, or are at different steps; nothing has changed.
        ModelError: weights that come together in a stage had different settings of the optimizer; nothing has changed.
        PipefitError: no process has the state of some layers, nor is there a copy of this step in the memory of its
            machine; nothing has changed.
    """
    session = session or pipe.session
    if session is pipe.session:
        session.settle()
    settle(pipe.device)  # the last step of a GPU may still run
    with session.at(MEETING):
        following, held = _prepared(pipe, plan, session, proved, is_restored)
        header = following.programs.shortest().header
        now = [_layers_of(following.plan, header, ranks) for ranks in following.ranks_of]
        moves = moves_of(pipe.layers, held, now, following.plan.tensor)
        gained = {layer for own, before in zip(now, held, strict=True) for layer in own if layer not in before}
        copies = _checked_sources(pipe, session, moves, gained, is_restored)
        for worker in pipe.workers:
            worker.mesh.meet_again()
            worker.forget_pass()
            if is_restored:
                worker.let_go()
        own = now[session.rank]
        give_memory([layer for layer in pipe.layers if layer.index in own], pipe.device, pipe.layers)
        moved = _moved(pipe, session, moves, bool(gained))
        if is_restored:
            # Those of this process may be of a step that was not committed.
            moved = moved._replace(records=())
        moved = _with_copies(pipe, session, moves, moved, copies)
        built = []
        try:
            agree(session, attempt(lambda: built.append(_built(pipe, following, moved, is_restored))), ModelError)
        except PipefitError as problem:
            if session.is_distributed:
                forget_others(pipe.layers, set(held[session.rank]))
            raise ModelError(f"the stages of the new plan cannot be made, the old one stays: {problem}") from None
        workers, takers = built[0]
        for take in takers:
            take()
        _follow(pipe, following, workers, moved)


# ---- prepare -------------------------------------------------------------------------------------------------------


def _prepared(
    pipe: Any, plan: Plan, session: Session, proved: Programs | None, is_restored: bool
) -> tuple[_Next, list[list[int]]]:
    """The plan with its proved program, and the layers whose state each process has; all processes agree on them."""
    found = []

    def prepare() -> JsonObject:
        if session is pipe.session and (why := why_fixed(pipe.plan) or why_fixed(plan)):
            raise PlanError(f"rearrange: {why}; save, and load the checkpoint into a new pipeline")
        if pipe.engine.is_lost and not is_restored:
            raise PlanError("rearrange: a step has failed after some of its updates; load a checkpoint from before")
        own = fitted(plan, pipe.given.work, session)
        programs = proved
        if programs is None or programs.plan != own:
            programs = Programs(own, pipe.training, pipe.layers, None)
        program = programs.shortest()
        ranks_of = [list(range(program.header.num_ranks))]
        if session.is_distributed:
            ranks_of = [[process // plan.tensor] for process in range(session.num_ranks)]
        found.append(_Next(own, programs, ranks_of, session))
        state = pipe.state.saved()
        alike = facts_of_plan(own) | {"program": program.digest, "step": pipe.num_updates}
        alike |= {"micro-batches trained": state["ordinal"], "loss scale": state["loss_scale"]}
        held = set()
        if not is_restored:
            held = {layer.index for layer in layers_of(pipe.workers)}
        return {"alike": alike, "held": sorted(held), "metrics": pipe.engine.metric_names}

    every = agree(session, attempt(prepare), PlanError)
    if unlike := differences({process: own["alike"] for process, own in enumerate(every)}):
        raise DisagreementError(f"{unlike}; {CURE}")
    names = [own["metrics"] for own in every if own["metrics"] is not None]
    if names:
        pipe.engine.metric_names = tuple(names[0])
    return found[0], [own["held"] for own in every]


def _layers_of(plan: Plan, header: Header, ranks: Sequence[int]) -> list[int]:
    """The layers of some ranks of a plan."""
    stages = {stage for rank in ranks for stage in header.stages_of(rank)}
    return sorted(layer for stage in stages for layer in plan.partition.stages[stage].layers)


def _checked_sources(
    pipe: Any, session: Session, moves: Sequence[Move], gained: Collection[int], is_restored: bool
) -> Here:
    """The copies of the last step in the memory of this machine, where no process has some of what moves.

    Raises:
        PipefitError: on every process: a layer cannot move, or a process lacks a copy that it needs.
    """
    copies = Here([], {})
    if not gained:
        return copies
    step = pipe.num_updates
    lost = [move for move in moves if move.source is None]
    if lost and pipe.recovery is not None and pipe.recovery.folder is not None:
        copies = steps_in(pipe.recovery.folder, step, step).get(step, copies)
        if is_restored and session.rank == 0:
            forget_newer(pipe.recovery.folder, step)

    def check() -> None:
        if why := why_stay(layer for layer in pipe.layers if layer.index in gained):
            raise PlanError(why)
        # Buffers that no state holds stay in every process, unless the model was made without memory.
        absent = {name for layer in pipe.layers for name, tensor in named_tensors(layer) if tensor.is_meta}
        if is_restored:
            absent |= tensors_of(pipe.layers).keys()
        for name, _, target in lost:
            if target == session.rank and name in absent and name not in copies.saved:
                raise PipefitError(
                    f"no process that is left has {name}, and there is no copy of step {step} in the memory of this "
                    "machine that has it: load a checkpoint"
                )
        if lost and pipe.loop.callbacks.moving:
            raise PipefitError("no process that is left has the averages of some weights: load a checkpoint")

    agree(session, attempt(check))
    return copies


def why_stay(layers: Iterable[NamedLayer]) -> str:
    """The reason why one of some layers cannot move, a state that is in no plain parameter or buffer; "": all can."""
    for layer in layers:
        for module in layer.module.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                return f"layer {layer.name} cannot move: its {type(module).__name__} has an extra state"
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
            if type(parameter) is not nn.Parameter:
                return f"layer {layer.name} cannot move: {name} is a {type(parameter).__name__}"
    return ""


# ---- move ----------------------------------------------------------------------------------------------------------


def _moved(pipe: Any, session: Session, moves: Sequence[Move], gains: bool) -> _Moved:
    """Everything that this process has after the moves.

    Args:
        pipe: that is trained.
        session: the processes from now on.
        moves: of weights and buffers.
        gains: whether any process gets a layer, which may have none of them.
    """
    first = first_names(pipe.layers)
    mine = belongings_of(pipe.workers, first, pipe.loop.callbacks.moving)
    records = [record for worker in pipe.workers for record in optimization_of(worker, worker.stages)]
    modes = _modes_of(pipe.workers)
    if not gains:
        return _Moved(first, mine, {}, records, modes)
    gone = {move.name for move in moves if move.source == session.rank}
    every = exchange(session, [forms_of(mine, gone), msgspec.to_builtins(records), list(modes.items())])
    places = {first[name]: tensor for layer in pipe.layers for name, tensor in named_tensors(layer)}
    arrived = exchange_tensors(session, moves, mine, places, [forms for forms, _, _ in every])
    for _, theirs, their_modes in every:
        # Of records about one weight the last one counts, which is this process's own.
        records = [*msgspec.convert(theirs, list[Optimization]), *records]
        modes = dict(their_modes) | modes
    return _Moved(first, mine | arrived, arrived, records, modes)


@torch.no_grad()
def _with_copies(pipe: Any, session: Session, moves: Sequence[Move], moved: _Moved, copies: Here) -> _Moved:
    """The state of this process with what no process had, from the copies in memory."""
    places = {name: tensor for layer in pipe.layers for name, tensor in named_tensors(layer)}
    lost = {name for name, source, target in moves if source is None and target == session.rank}
    found = {name: {WEIGHT: places[name]} for name in lost}
    readers = readers_of(pipe.engine.mesh, copies.saved)
    for name in lost & readers.keys():
        places[name].copy_(readers[name]())
    for weight, states in by_parameter(readers).items():
        if weight in lost:
            found[weight] |= {key: read() for key, read in states.items()}
    records = [record for manifest in copies.manifests for record in manifest.optimization]
    return moved._replace(everything=moved.everything | found, records=[*records, *moved.records])


def _modes_of(workers: Sequence[Worker]) -> dict[int, list[bool]]:
    """Whether each module of each layer is in training mode."""
    return {layer.index: [module.training for module in layer.module.modules()] for layer in layers_of(workers)}


# ---- build ---------------------------------------------------------------------------------------------------------


def _built(
    pipe: Any, following: _Next, moved: _Moved, is_restored: bool
) -> tuple[list[Worker], list[Callable[[], None]]]:
    """The workers of a plan, and the functions that restore the optimizers of those stages that have new ones.

    Raises:
        ModelError: weights that now share a group of an optimizer had different settings.
    """
    plan = following.plan
    header = following.programs.shortest().header
    kept: dict[Indices, Stepped] = {}
    if not is_restored:
        for worker in pipe.workers:
            kept |= worker.stepped()
    of_before = {id(one.optimizer) for one in kept.values()}
    # The copies of a stage in one process must not share their states.
    reader = read_of if following.session.is_distributed else _read_copy_of
    states = {}
    for name, tensors in moved.everything.items():
        states[name] = {key: reader(tensor) for key, tensor in tensors.items() if is_state(key)}
    ties = tied_parameters(pipe.layers, plan.partition)
    workers = []
    takers = []
    ranks = following.ranks_of[following.session.rank]
    parts = split(pipe.layers, plan.partition, [header.stages_of(rank) for rank in ranks])
    for rank, part in zip(ranks, parts, strict=True):
        for layer in chain.from_iterable(part.values()):
            _fill(layer, moved)
        worker = worker_of(rank, part, plan, ties, pipe.training, pipe.device, mesh=pipe.engine.mesh, kept=kept)
        workers.append(worker)
        for stage, optimizer in worker.optimizers.items():
            if id(optimizer) not in of_before:
                takers.append(restore_optimizer(worker, stage, moved.records, states))
    stays = {id(optimizer) for worker in workers for optimizer in worker.optimizers.values()}
    for before, worker in zip(pipe.workers, workers, strict=False):
        free = [optimizer for _, optimizer in sorted(before.optimizers.items()) if id(optimizer) not in stays]
        made = [stage for stage, optimizer in sorted(worker.optimizers.items()) if id(optimizer) not in of_before]
        takers += [partial(_keep_object, worker, stage, old) for stage, old in zip(made, free, strict=False)]
    return workers, takers


def _keep_object(worker: Worker, stage: int, before: Optimizer) -> None:
    """Lets an optimizer of before step a new stage: the user may hold it, as a schedule that follows a metric does."""
    made = worker.optimizers[stage]
    if type(made) is type(before):
        before.param_groups = made.param_groups
        before.state = made.state
        worker.optimizers[stage] = before
        if stage in worker.schedulers:
            worker.schedulers[stage].optimizer = before


def _read_copy_of(tensor: Tensor) -> Read:
    return tensor.clone


@torch.no_grad()
def _fill(layer: NamedLayer, moved: _Moved) -> None:
    """Gives a layer the values that it has elsewhere in this process: copies of stages have modules of their own."""
    for name, tensor in named_tensors(layer):
        known = moved.everything[moved.first[name]][WEIGHT]
        if known is not tensor:
            tensor.copy_(known)
    if layer.index in moved.modes:
        for module, mode in zip(layer.module.modules(), moved.modes[layer.index], strict=True):
            module.training = mode


# ---- follow --------------------------------------------------------------------------------------------------------


def _follow(pipe: Any, following: _Next, workers: Sequence[Worker], moved: _Moved) -> None:
    """Lets the pipeline follow a plan with its workers, and frees what this process no longer needs."""
    scales = pipe.state.scales
    for index, worker in enumerate(workers):
        if index < len(scales):
            worker.scale = scales[index]
        elif worker.scale is not None:
            worker.scale.load(scales[0].state())
    session = following.session
    program = following.programs.shortest()
    pipe.engine.take(workers, program.header.num_stages, session)
    pipe.follow(following.plan, following.programs, session)
    release_others(workers, pipe.plan, pipe.given, session)
    held = {moved.first[own.saved_name] for worker in workers for part in worker.owned.values() for own in part}
    for number, table in enumerate(pipe.loop.callbacks.moving):
        for name in table.keys() - held:
            del table[name]
        for name, tensors in moved.arrived.items():
            if other_key(number) in tensors:
                table[name] = tensors[other_key(number)]
    pipe.engine.prepare(program, is_compared=True)
