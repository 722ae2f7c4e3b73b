"""Collectives on gradients: over replicas, over stages that share a weight, and the norm of all for clipping.

Also those that gather new weights from the parts that replicas have stepped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction, Instructions, StageAt
from pipefit.ir.liveness import is_in_place
from pipefit.ir.op import STEP_OPS, Op, Reduction
from pipefit.ir.program import Header, Program
from pipefit.ir.values import tied_stages
from pipefit.passes.places import Added, inserted, last_backwards


def with_reductions(program: Program) -> Program:
    """Adds each reduction as soon as its gradients are complete on the rank, so that it overlaps with later work.

    Gradients of weights that stages share are summed over all stages and ranks that hold them (replicas included), the
    others over the replicas of a stage. The ranks of a tie reach its reduction at different times, so it comes after
    all backwards of the update on the rank: no other rank then needs anything from one that waits there. The norm for
    clipping needs all reductions, so it comes just before the first step of its update. Where each replica steps a part
    of the weights, the new weights are gathered right after the step, while the rank continues.
    """
    header = program.header
    ends = [last_backwards(header, own) for own in program.ranks]
    ranks = []
    for rank, own in enumerate(program.ranks):
        added: Added = defaultdict(list)
        _reduce_replicas(header, rank, ends, added)
        _reduce_ties(header, rank, ends[rank], added)
        _add_norms_and_gathers(header, own, added)
        ranks.append(inserted(own, added))
    return program.with_ranks(ranks)


_Ends = Mapping[StageAt, int]
"""The index of the last backward of each (stage, update) of a rank."""


def _reduce_replicas(header: Header, rank: int, ends: Sequence[_Ends], added: Added) -> None:
    """Adds the reductions over the replicas of each stage of a rank."""

    def end_on_first(key: StageAt) -> int:
        stage, _ = key
        return ends[header.placement[stage][0]][key]

    last = ends[rank]
    copies = {len(members) for members in header.placement}
    # A rank that waits in a reduction would keep others from the work that they need before theirs.
    waits_for_all = len(copies) > 1 and header.num_chunks > 1
    # Replicas of unequal numbers of micro-batches complete their stages in different orders: the first one's counts.
    complete: dict[Sequence[int], int] = defaultdict(int)
    for stage, update in sorted(last, key=end_on_first):
        members = header.placement[stage]
        ready = last[stage, update]
        if waits_for_all:
            ready = max(index for (_, of), index in last.items() if of == update)
        complete[members] = max(complete[members], ready)
        kind = Reduction.REPLICAS
        if header.is_sharded(stage):
            kind = Reduction.SCATTER
        if len(members) > 1:
            added[complete[members] + 1].append(_reduce(kind, stage, update))


def _reduce_ties(header: Header, rank: int, last: _Ends, added: Added) -> None:
    """Adds the reductions of the weights that several stages share."""
    for tie in header.ties:
        own = tied_stages(header, tie[0], rank)
        members = collective_members(header, _reduce(Reduction.TIED, tie[0], 0))
        if own and (len(own) > 1 or len(members) > 1):
            for update in {update for stage, update in last if stage in own}:
                ready = max(index for (_, of), index in last.items() if of == update)
                added[ready + 1].append(_reduce(Reduction.TIED, tie[0], update))


def _add_norms_and_gathers(header: Header, instructions: Instructions, added: Added) -> None:
    """Adds the norms before the first steps, and after the steps what gathers sharded weights."""
    normed = set()
    for index, i in enumerate(instructions):
        if header.clip and i.op in STEP_OPS and i.version not in normed:
            normed.add(i.version)
            norm = _reduce(Reduction.NORM, -1, i.version)
            added[index].append(norm)
        if i.op is Op.STEP and header.is_sharded(i.stage) and header.is_resident(i.stage):
            place = index + 1 + is_in_place(instructions, index)
            gather = _reduce(Reduction.SHARDS, i.stage, i.version)
            added[place].append(gather)


def _reduce(kind: Reduction, stage: int, update: int) -> Instruction:
    return Instruction(Op.REDUCE, stage, version=update, kind=kind.value)
