"""Places in a rank's list: where its gradients are complete, and how a pass adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import COMPUTE_OPS, WEIGHT_GRADIENT_OPS
from pipefit.ir.program import Header


def inserted(listed: Sequence[Instruction], before: Mapping[int, Sequence[Instruction]]) -> list[Instruction]:
    """The list with instructions inserted before some indices."""
    return [i for index in range(len(listed) + 1) for i in (*before.get(index, ()), *listed[index : index + 1])]


def last_backwards(header: Header, listed: Sequence[Instruction]) -> dict[tuple[int, int], int]:
    """The index of the last own backward of each (stage, update): there its gradients are complete."""
    done = enumerate(listed)
    return {(i.stage, header.update_of(i.stage, i.mb)): index for index, i in done if i.op in WEIGHT_GRADIENT_OPS}


def computes_back(listed: Sequence[Instruction], index: int, count: int) -> int:
    """The index of the compute instruction that lies `count` compute instructions before `index`."""
    while index > 0 and count > 0:
        index -= 1
        count -= listed[index].op in COMPUTE_OPS
    return index
