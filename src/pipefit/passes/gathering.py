"""Sharing: the copies of a stage keep one set of its weights between them, or one set of its gradients.

    unshard 0 | F0.0 F0.1 | drop 0, unshard 2 ...                slot 0 of the weights
    unshard 1 |           | F1.0 F1.1 | drop 1 ...               slot 1
                                    | B1.1 B1.0 | scatter 1 | free 1 | B0.1 B0.0 ...

A peer's memory is a tier: as spilled stages are fetched from the host, the weights of a stage are gathered from its
copies before they are used and freed after. Gradients are whole while backwards add to them; then each copy keeps its
part of the sum, and whole ones are freed before the next backward needs memory for others. A slot is given up as in
`pipefit.passes.spilling`, for the stage whose next visit is farthest. A rank whose stages all have slots gathers each
once per update.

Source: ZeRO, stages 2 and 3 (SC 2020). Where passes of one stage follow each other, a looped schedule gathers less
often: Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import groupby

from msgspec.structs import replace

from pipefit.ir.instruction import Indices, Instruction, Instructions
from pipefit.ir.op import COMPUTE_OPS, WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Header, Program
from pipefit.passes.places import Added, inserted
from pipefit.passes.stays import Stay, stays_until


def with_sharing(program: Program) -> Program:
    """Gathers shared weights before they are used, scatters shared gradients, and frees both."""
    header = program.header
    if not any(map(header.shares_gradients, range(header.num_stages))):
        return program
    if not _copies_agree(program):
        header = replace(header, shard_slots=max(header.num_chunks, header.shard_slots))
    slots = header.shard_slots
    ranks = []
    for rank, listed in enumerate(program.ranks):
        own = list(listed)
        if slots < len(header.stages_of(rank)):
            own = [i for i in own if not _is_scatter(header, i)]
        added: Added = defaultdict(list)
        _add_gradients(header, own, slots, added)
        if header.shard == "weights":
            _add_weights(header, own, slots, added)
            _add_parts_for_others(header, rank, own, added)
        ranks.append(inserted(own, added))
    return Program(header, tuple(map(tuple, ranks)))


def gathering_of(header: Header) -> Program:
    """A program that only gathers the shared weights of each rank: between two steps, whole until they are freed."""
    ranks = []
    for rank in range(header.num_ranks):
        shared = filter(header.shares_weights, header.stages_of(rank))
        ranks.append(tuple(Instruction(Op.UNSHARD, stage, version=0) for stage in shared))
    return Program(header, tuple(ranks))


def _copies_agree(program: Program) -> bool:
    """Returns whether all copies of a stage that visit any go from stage to stage in the same order.

    Others gather once per update, because all copies must gather equally often.
    """
    orders = [[_turns(listed, ops) for ops in (COMPUTE_OPS, WEIGHT_GRADIENT_OPS)] for listed in program.ranks]
    for ranks in program.header.placement:
        found = [orders[rank] for rank in ranks if any(orders[rank])]
        if any(order != found[0] for order in found):
            return False
    return True


def _turns(listed: Instructions, ops: Collection[Op]) -> list[int]:
    """The stages that some operations visit, each once for visits that follow each other."""
    return [stage for stage, _ in groupby(i.stage for i in listed if i.op in ops)]


def _is_scatter(header: Header, i: Instruction) -> bool:
    return i.op is Op.REDUCE and i.kind == Reduction.SCATTER and header.shares_gradients(i.stage)


def _stays(header: Header, listed: Instructions, ops: Collection[Op], slots: int) -> list[Stay]:
    """The stays of shared stages for their visits by some operations; none goes beyond the step of its update."""

    def visited(i: Instruction) -> Indices:
        if i.op in ops and header.shares_gradients(i.stage):
            return (i.stage,)
        return ()

    return stays_until(listed, visited, Op.STEP, slots)


def _add_gradients(header: Header, listed: Instructions, slots: int, added: Added) -> None:
    """Adds the sums of gradients, and what frees whole ones: before the next backward of the rank, or their step."""
    found = _stays(header, listed, WEIGHT_GRADIENT_OPS, slots)
    summed = any(_is_scatter(header, i) for i in listed)
    visits = sorted(visit for stay in found for visit in stay.visits)
    steps = {(i.stage, i.version): index for index, i in enumerate(listed) if i.op is Op.STEP}
    for stay in found:
        update = header.update_of(stay.stage, listed[stay.last].mb)
        place = steps[stay.stage, update]
        if not summed:
            scatter = Instruction(Op.REDUCE, stay.stage, version=update, kind=Reduction.SCATTER.value)
            added[stay.last + 1].append(scatter)
            later = (visit for visit in visits if visit > stay.last)
            place = min(place, next(later, place))
        free = Instruction(Op.FREE, stay.stage, version=update)
        added[place].append(free)


def _add_weights(header: Header, listed: Instructions, slots: int, added: Added) -> None:
    """Adds what gathers whole weights, as soon as a slot is free and they are stepped, and what frees them."""
    # By stage and version that a step makes, the index after the step.
    made = {(i.stage, i.version + 1): index + 1 for index, i in enumerate(listed) if i.op is Op.STEP}
    start = 0
    for stay in _stays(header, listed, COMPUTE_OPS, slots):
        version = listed[stay.first].version
        if stay.before:
            start = max(start, stay.before.last + 1)
        start = max(start, made.get((stay.stage, version), 0))
        added[start].append(Instruction(Op.UNSHARD, stay.stage, version=version))
        drop = Instruction(Op.DROP, stay.stage, version=version)
        added[stay.last + 1].insert(0, drop)


def _add_parts_for_others(header: Header, rank: int, listed: Instructions, added: Added) -> None:
    """Adds the gathers of stages that only other copies visit, which need this copy's parts: fewer samples than copies.

    They come in the order of the stages, in which the others gather them: see `pipefit.schedules.forward`.
    """
    visits = [(index, i.stage) for index, i in enumerate(listed) if i.op in COMPUTE_OPS]
    visited = {stage for _, stage in visits}
    for stage in filter(header.shares_weights, header.stages_of(rank)):
        if stage not in visited:
            place = next((index for index, later in visits if later > stage), len(listed))
            added[place].append(Instruction(Op.UNSHARD, stage, version=0))
            added[place].append(Instruction(Op.DROP, stage, version=0))
