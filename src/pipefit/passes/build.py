"""From the order of forwards and backwards to a whole program."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pipefit.ir.instruction import Instruction
from pipefit.ir.program import Header, Program
from pipefit.passes.commit_point import with_commit
from pipefit.passes.communication import with_communication
from pipefit.passes.data import with_data
from pipefit.passes.frozen import with_frozen, with_norms_everywhere
from pipefit.passes.gathering import with_sharing
from pipefit.passes.recompute import with_recompute
from pipefit.passes.reduction import with_reductions
from pipefit.passes.scatter_gather import with_scatter_gather
from pipefit.passes.spilling import with_spilling
from pipefit.passes.versions import with_drops, with_steps, with_versions


def build(
    header: Header,
    order: Iterable[Iterable[Instruction]],
    *,
    recompute: Collection[int] | None = (),
    ahead: int = 1,
    prefetch: int | None = None,
) -> Program:
    """The program of a schedule: its order of computation, and the other instructions, which follow from the header.

    Args:
        header: placement, counts, weight rule, ties, clipping, spilling and frozen stages.
        order: forwards and backwards of each rank.
        recompute: stages that replay their forward (None: all).
        ahead: compute instructions between posting a receive and needing it.
        prefetch: stages ahead that a spilled one is fetched (None: as soon as a slot is free).
    """
    program = Program(header, tuple(map(tuple, order)))
    program = with_frozen(program)
    program = with_recompute(program, recompute)
    program = with_versions(program)
    program = with_steps(program)
    program = with_drops(program)
    program = with_reductions(program)
    program = with_norms_everywhere(program)
    program = with_commit(program)
    program = with_sharing(program)
    program = with_data(program)
    program = with_communication(program, ahead)
    program = with_scatter_gather(program)
    return with_spilling(program, prefetch)
