"""Loads and losses."""

from __future__ import annotations

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Program


def with_data(program: Program) -> Program:
    """Adds a load before each forward of stage 0, and before each loss; a loss after each forward of the last stage.

    With one stage, one load serves both.
    """
    last = program.header.last_stage
    forward = Op.FWD
    ranks = []
    for instructions in program.ranks:
        listed = []
        for i in instructions:
            if i.op is forward and i.stage == 0:
                listed.append(Instruction(Op.LOAD, 0, i.mb))
            listed.append(i)
            if i.op is forward and i.stage == last:
                if last > 0:
                    listed.append(Instruction(Op.LOAD, last, i.mb))
                listed.append(Instruction(Op.LOSS, mb=i.mb))
        ranks.append(listed)
    return program.with_ranks(ranks)
