"""Places in a rank's list: where values enter and gradients are complete; and insertion of instructions."""

from __future__ import annotations

from collections.abc import Mapping

from pipefit.ir.instruction import Instruction, Instructions, StageNumbers, ValueKey
from pipefit.ir.op import COMPUTE_OPS, FORWARD_OPS, WEIGHT_GRADIENT_OPS
from pipefit.ir.program import Header
from pipefit.ir.values import ACT, GRAD

Added = dict[int, list[Instruction]]
"""Instructions to be inserted before others, by the index of these."""


def inserted(listed: Instructions, before: Mapping[int, Instructions]) -> list[Instruction]:
    """The list with instructions inserted before some indices."""
    result: list[Instruction] = []
    done = 0
    for index in sorted(before):
        result += (*listed[done:index], *before[index])
        done = index
    return [*result, *listed[done:]]


def entering(i: Instruction) -> ValueKey:
    """The value, by kind, stage and micro-batch, that a compute instruction may need from another rank."""
    if i.op in FORWARD_OPS:
        return ACT, i.stage - 1, i.mb
    if i.op in COMPUTE_OPS:
        return (GRAD, i.stage, i.mb)
    return ("", -1, -1)


def last_backwards(header: Header, listed: Instructions) -> StageNumbers:
    """The index of the last own backward of each (stage, update): there its gradients are complete."""
    found = {}
    for index, i in enumerate(listed):
        if i.op in WEIGHT_GRADIENT_OPS:
            found[i.stage, header.update_of(i.stage, i.mb)] = index
    return found


def computes_back(listed: Instructions, index: int, count: int) -> int:
    """The index of the compute instruction that lies `count` compute instructions before `index`."""
    while index > 0 and count > 0:
        index -= 1
        count -= listed[index].op in COMPUTE_OPS
    return index
