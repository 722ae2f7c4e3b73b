"""Re-materialisation: keep a stage's input, replay its forward before its backward."""

from __future__ import annotations

from collections.abc import Collection

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import COMPUTE_OPS, GRADIENT_OPS, Op
from pipefit.ir.program import Program


def with_recompute(program: Program, stages: Collection[int] | None = None) -> Program:
    """Adds a recompute before each backward of the given stages (None: all).

    A backward that directly follows its own forward gets none: a replay would repeat the computation just done.
    (So GPipe's last stage never replays its last micro-batch, and 1F1B's last stage never replays at all.)

    Source: GPipe (NeurIPS 2019) §2.3.
    """
    ranks = []
    for instructions in program.ranks:
        listed = []
        before = None
        for i in instructions:
            wanted = i.op in GRADIENT_OPS and (stages is None or i.stage in stages)
            if wanted and before != (Op.FWD, i.stage, i.mb):
                listed.append(Instruction(Op.RECOMPUTE, i.stage, i.mb))
            listed.append(i)
            if i.op in COMPUTE_OPS:
                before = (i.op, i.stage, i.mb)
        ranks.append(listed)
    return program.with_ranks(ranks)
