"""A window on a program's grid: ranks as rows, instructions as columns, a mark at one cell."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import MESSAGE_OPS, OP_SPEC, Op, Reduction
from pipefit.units import columns

_AROUND, _ROWS = 3, 8
"""Columns that are shown before and after an instruction, and the maximum number of ranks."""

_ABBREVIATED = {
    Reduction.REPLICAS.value: "sum",
    Reduction.SCATTER.value: "sums",
    Reduction.SHARDS.value: "join",
    Reduction.TIED.value: "tied",
    Reduction.NORM.value: "norm",
}


def cell(i: Instruction) -> str:
    """A short label that distinguishes an instruction from all others.

    >>> cell(Instruction(Op.FWD, 0, 3, 0)), cell(Instruction(Op.SEND, 0, 3, kind="act", peer=1))
    ('F0.3', 'act0.3>1')
    >>> cell(Instruction(Op.STEP, 2, version=1)), cell(Instruction(Op.REDUCE, 2, version=1, kind="replicas"))
    ('S2w1', 'sum2w1')
    """
    if i.op in MESSAGE_OPS:
        return f"{i.kind}{i.stage}.{i.mb}{'>' if i.op is Op.SEND else '<'}{i.peer}"
    if i.op is Op.LOSS:
        return f"loss.{i.mb}"
    if i.op is Op.REDUCE:
        return f"{_ABBREVIATED.get(i.kind, i.kind)}{i.stage if i.stage >= 0 else ''}w{i.version}"
    name = OP_SPEC[i.op].letter or i.op.value
    if "mb" in OP_SPEC[i.op].fields:
        return f"{name}{i.stage}.{i.mb}"
    return f"{name}{i.stage}w{i.version}" if "stage" in OP_SPEC[i.op].fields else name


def excerpt(ranks: Sequence[Sequence[Instruction]], rank: int, index: int) -> str:
    """The grid around an instruction; its cell is marked >like this<. Columns are positions, not times.

    Args:
        ranks: the instructions of each rank.
        rank: row of the mark.
        index: column of the mark.
    """
    first = max(0, min(rank - _ROWS // 2, len(ranks) - _ROWS))
    shown = range(max(0, index - _AROUND), index + _AROUND + 1)
    table = [["", *(str(column) for column in shown)]]
    for row in range(first, min(first + _ROWS, len(ranks))):
        cells = [cell(ranks[row][column]) if column < len(ranks[row]) else "" for column in shown]
        if row == rank:
            cells[index - shown.start] = f">{cells[index - shown.start]}<"
        table.append([f"rank {row}", *cells])
    return "\n".join(f"    {line}" for line in columns(table))
