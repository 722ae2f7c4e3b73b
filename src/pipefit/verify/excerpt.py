"""A window on a program's grid: ranks as rows, instructions as columns, a mark at one cell."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.ir.instruction import Instruction, Instructions, arrow
from pipefit.ir.op import MESSAGE_OPS, OP_SPEC, Op, Reduction
from pipefit.units import columns

_AROUND = 3
_ROWS = 8
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
        way = arrow(i.op)
        return f"{i.kind}{i.stage}.{i.mb}{way}{i.peer}"
    if i.op is Op.LOSS:
        return f"loss.{i.mb}"
    if i.op is Op.REDUCE:
        kind = _ABBREVIATED.get(i.kind, i.kind)
        stage = i.stage if i.stage >= 0 else ""
        return f"{kind}{stage}w{i.version}"
    spec = OP_SPEC[i.op]
    if "mb" in spec.fields:
        return i.short
    name = spec.letter or i.op.value
    if "stage" in spec.fields:
        return f"{name}{i.stage}w{i.version}"
    return name


def excerpt(ranks: Sequence[Instructions], rank: int, index: int) -> str:
    """The grid around an instruction; its cell is marked >like this<. Columns are positions, not times.

    Args:
        ranks: the instructions of each rank.
        rank: row of the mark.
        index: column of the mark.
    """
    last_top = max(0, len(ranks) - _ROWS)
    top = min(max(0, rank - _ROWS // 2), last_top)
    left = max(0, index - _AROUND)
    shown = range(left, index + _AROUND + 1)
    table = [["", *map(str, shown)]]
    for row, instructions in enumerate(ranks[top : top + _ROWS], top):
        cells = [cell(i) for i in instructions[left : shown.stop]]
        cells += [""] * (len(shown) - len(cells))
        if row == rank:
            marked = cells[index - left]
            cells[index - left] = f">{marked}<"
        table.append([f"rank {row}", *cells])
    return "\n".join(f"    {line}" for line in columns(table))
