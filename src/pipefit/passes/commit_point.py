"""The commit point of a step: where all ranks meet, with whole gradients, before any of them steps.

    rank 0   … bwd  reduce  norm ┐         ┌ step
                                 │ barrier │
    rank 1   … bwd  reduce  norm ┘         └ step

One that has passed it knows that all have come to it, and no step needs a message. So after the loss of a rank the
others make the step, all of them or none.
"""

from __future__ import annotations

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.passes.places import inserted


def with_commit(program: Program) -> Program:
    """Adds a barrier before the first step of each rank, and at the end of a rank that trains nothing."""
    if not program.header.commit:
        return program
    ranks = []
    for own in program.ranks:
        steps = (index for index, i in enumerate(own) if i.op is Op.STEP)
        first = next(steps, len(own))
        ranks.append(inserted(own, {first: (Instruction(Op.BARRIER),)}))
    return program.with_ranks(ranks)
