"""Scatter/gather: a value that all t tensor-parallel processes hold crosses the link once, in pieces, not t times."""

from __future__ import annotations

from msgspec.structs import replace

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import MESSAGE_OPS, PIECE_OF, Op
from pipefit.ir.program import Program
from pipefit.passes.places import entering


def with_scatter_gather(program: Program) -> Program:
    """Sends and receives pieces, and adds a gather just before the instruction that needs the whole.

    Without sequence parallelism a stage's output is the same on all t processes of its rank, and so is the gradient of
    its input. Each sends 1/t of it, flattened, to its peer of the next rank, where the t processes gather the whole
    from each other over their own, faster links. A tensor whose size t does not divide travels whole, in the piece.
    Unless the header has `pieces`, nothing changes.

        send s0 m0 act >1           recv s0 m0 act <0
                                    fwd s1 m0 w0
    becomes
        send s0 m0 act-piece >1     recv s0 m0 act-piece <0
                                    gather s0 m0 act
                                    fwd s1 m0 w0

    Source: Narayanan et al. (SC 2021) §4.1.
    """
    if not program.header.pieces:
        return program
    ranks = []
    for instructions in program.ranks:
        listed = []
        arriving = set()
        for i in instructions:
            if i.op in MESSAGE_OPS and i.kind in PIECE_OF:
                if i.op is Op.RECV:
                    arriving.add((i.kind, i.stage, i.mb))
                listed.append(replace(i, kind=PIECE_OF[i.kind]))
                continue
            needed = entering(i)
            if needed in arriving:
                arriving.discard(needed)
                kind, stage, mb = needed
                listed.append(Instruction(Op.GATHER, stage, mb, kind=kind))
            listed.append(i)
        ranks.append(listed)
    return program.with_ranks(ranks)
