"""Frozen stages: no gradient travels below the first stage that trains."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op, Reduction
from pipefit.ir.program import Program
from pipefit.passes.places import Added, inserted


def with_frozen(program: Program) -> Program:
    """Leaves out the backwards of frozen stages, and so their replays, gradient messages, reductions and steps."""
    first = program.header.frozen
    ranks = []
    for own in program.ranks:
        ranks.append([i for i in own if i.op is Op.FWD or i.stage >= first])
    return program.with_ranks(ranks)


def with_norms_everywhere(program: Program) -> Program:
    """Adds the norms for clipping, which all ranks gather, to ranks that train nothing.

    Such a rank comes to a norm right after the last of its forwards that ranks which train need before it: no later, or
    they would wait for it longer than necessary, and no earlier, or all would wait for each other.
    """
    header = program.header
    if not (header.clip and header.frozen):
        return program
    # Of each norm, by stage: the last micro-batch whose forward comes before it.
    before: dict[int, list[int]] = {}
    for own in program.ranks:
        newest = [-1] * header.num_stages
        for i in own:
            if i.op is Op.FWD:
                newest[i.stage] = i.mb
            elif i.op is Op.REDUCE and i.kind == Reduction.NORM:
                before[i.version] = list(map(max, newest, before.get(i.version, newest)))
    updates = sorted(before)
    ranks = []
    for rank, own in enumerate(program.ranks):
        added: Added = {}
        if header.stages_of(rank)[-1] < header.frozen:
            needed = {s: [max(before[update][s + 1 :]) for update in updates] for s in header.stages_of(rank)}
            places = [0] * (len(updates) + 1)
            for index, i in enumerate(own):
                if i.op is Op.FWD:
                    places[bisect_left(needed[i.stage], i.mb)] = index + 1
            for update, place in zip(updates, accumulate(places, max), strict=False):
                norm = Instruction(Op.REDUCE, version=update, kind=Reduction.NORM.value)
                added.setdefault(place, []).append(norm)
        ranks.append(inserted(own, added))
    return program.with_ranks(ranks)
