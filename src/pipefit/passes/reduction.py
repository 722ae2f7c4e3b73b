"""Collectives on gradients: over replicas, over stages that share a weight, and the norm of all for clipping.

And those that put weights together which replicas have stepped in parts.
"""

from __future__ import annotations

from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.liveness import is_in_place
from pipefit.ir.op import STEP_OPS, WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Program
from pipefit.ir.values import tied_stages


def with_reductions(program: Program) -> Program:
    """Adds a reduction as soon as its gradients are complete on the rank, so that it overlaps with what follows.

    Weights that stages share are summed over all stages and ranks that hold them (replicas included), the rest over the
    replicas of a stage. The ranks of a tie come to its reduction at different times, so it waits until all backwards of
    the update on the rank are done: no other rank then needs anything from one that waits there. The norm for clipping
    needs all reductions, so it comes just before the first step of its update. Where replicas step a part of the
    weights each, the new weights are put together right after the step, while the rank goes on.
    """
    header = program.header
    ranks = []
    for rank, instructions in enumerate(program.ranks):
        listed: list[Instruction] = []
        normed: set[int] = set()
        after, joins = _reductions_after(program, rank), _joins_after(program, rank)
        for index, i in enumerate(instructions):
            if header.clip and i.op in STEP_OPS and i.version not in normed:
                normed.add(i.version)
                listed.append(Instruction(Op.REDUCE, version=i.version, kind=Reduction.NORM.value))
            listed.append(i)
            listed += after.get(index, ())
            listed += joins.get(index, ())
        ranks.append(listed)
    return program.with_ranks(ranks)


def _reductions_after(program: Program, rank: int) -> dict[int, list[Instruction]]:
    """For the index of the backward that completes some gradients: the reductions that may then start."""
    header = program.header
    last: dict[tuple[int, int], int] = {}
    for index, i in enumerate(program.ranks[rank]):
        if i.op in WEIGHT_GRADIENT_OPS:
            last[i.stage, header.update_of(i.stage, i.mb)] = index
    result: dict[int, list[Instruction]] = {}
    for (stage, update), index in last.items():
        kind = Reduction.SCATTER if header.is_sharded(stage) else Reduction.REPLICAS
        reduce = Instruction(Op.REDUCE, stage, version=update, kind=kind.value)
        if len(collective_members(header, reduce)) > 1:
            result.setdefault(index, []).append(reduce)
    for tie in header.ties:
        reduce = Instruction(Op.REDUCE, tie[0], version=0, kind=Reduction.TIED.value)
        own = tied_stages(header, tie[0], rank)
        if not own or (len(own) == 1 and len(collective_members(header, reduce)) == 1):
            continue
        for update in {update for stage, update in last if stage in own}:
            ready = max(index for (_, of), index in last.items() if of == update)
            instruction = Instruction(Op.REDUCE, tie[0], version=update, kind=Reduction.TIED.value)
            result.setdefault(ready, []).append(instruction)
    return result


def _joins_after(program: Program, rank: int) -> dict[int, list[Instruction]]:
    """For the index of a step that makes a part of new weights, or of its drop: what puts the parts together."""
    instructions = program.ranks[rank]
    return {
        index + is_in_place(instructions, index): [
            Instruction(Op.REDUCE, i.stage, version=i.version, kind=Reduction.SHARDS.value)
        ]
        for index, i in enumerate(instructions)
        if i.op is Op.STEP and program.header.is_sharded(i.stage)
    }
