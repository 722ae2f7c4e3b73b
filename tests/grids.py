"""The grid of a program's compute when every forward and backward takes one unit and messages take none."""

from pipefit.ir import COMPUTE_OPS, Op, Program
from pipefit.ir.op import OP_SPEC


def columns(program: Program) -> list[list[str]]:
    """For each rank its cells over time; "." where it waits."""
    header = program.header
    todo = [[i for i in own if i.op in COMPUTE_OPS] for own in program.ranks]
    ends: dict[tuple[Op, int, int], int] = {}
    free = [0] * len(todo)
    rows: list[list[str]] = [[] for _ in todo]
    while any(todo):
        before = len(ends)
        for rank, own in enumerate(todo):
            while own and (start := _start(own[0], header.last_stage, ends)) is not None:
                i = own.pop(0)
                start = max(start, free[rank])
                rows[rank] += ["."] * (start - len(rows[rank])) + [_cell(i, header.num_chunks)]
                ends[i.op, i.stage, i.mb] = free[rank] = start + 1
        assert len(ends) > before, "stands still"
    width = max(map(len, rows))
    return [row + ["."] * (width - len(row)) for row in rows]


def _start(i, last, ends):
    if i.op is Op.FWD:
        return 0 if i.stage == 0 else ends.get((Op.FWD, i.stage - 1, i.mb))
    if i.op is Op.BWD_WEIGHT:
        return ends.get((Op.BWD_INPUT, i.stage, i.mb))
    return ends.get((Op.FWD, i.stage, i.mb) if i.stage == last else (i.op, i.stage + 1, i.mb))


def _cell(i, num_chunks):
    return f"{OP_SPEC[i.op].letter}{i.mb}" if num_chunks == 1 else f"{OP_SPEC[i.op].letter}{i.stage}.{i.mb}"


def grid(program: Program) -> str:
    """The grid as text."""
    rows = columns(program)
    width = max(len(cell) for row in rows for cell in row)
    lines = (" ".join(cell.ljust(width) for cell in row) + f"   rank {rank}" for rank, row in enumerate(rows))
    return "\n".join(lines)
