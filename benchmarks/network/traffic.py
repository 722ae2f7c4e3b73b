"""Bytes that a program sends, computed from it: messages by the size law, reductions as the ring that Gloo runs."""

from __future__ import annotations

from pipefit.cost import CostModel
from pipefit.ir.graph import collective_members
from pipefit.ir.op import Op, Reduction
from pipefit.ir.program import Program
from pipefit.ir.values import Value


def ring_bytes(num_bytes: float, members: int) -> float:
    """Bytes that each member of a ring all-reduce sends: 2(d−1)/d of the data.

    >>> ring_bytes(1200, 4), ring_bytes(1200, 1)
    (1800.0, 0.0)
    """
    return 2 * (members - 1) / members * num_bytes


def program_bytes(program: Program, cost: CostModel) -> list[float]:
    """Bytes that each rank sends in one pass over a program without ties or clipping."""
    sent = [0.0] * len(program.ranks)
    for rank, _, i in program:
        if i.op is Op.SEND:
            sent[rank] += cost.size_bytes(Value(i.kind, i.stage, i.mb))
        elif i.op is Op.REDUCE and i.kind == Reduction.REPLICAS:
            members = collective_members(program.header, i)
            sent[rank] += ring_bytes(cost.wgrad_bytes[i.stage], len(members))
    return sent
