"""A program laid out flat for the simulator: the code of each instruction for the clock, built once per program."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pipefit.ir.graph import Graph, dependency_graph
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import MESSAGE_OPS, WORK_OPS
from pipefit.ir.program import Program


class Code(enum.IntEnum):
    """The action of a rank's clock at an instruction.

    WORK: runs at once; all values it needs come from earlier work of the rank.
    WAIT: runs once messages or reductions have arrived.
    MESSAGE: is issued; it waits only for its other side.
    PENDING: is issued; it waits asynchronously for the values it needs: reductions, copies, messages passed on.
    """

    WORK = 0
    WAIT = 1
    MESSAGE = 2
    PENDING = 3


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """The instructions of all ranks in one list, numbered as in the dependency graph.

    Attributes:
        graph: the dependency graph.
        codes: a `Code` for each instruction.
        waits: for each, the messages, reductions and copies whose values it needs.
        users: for each of those, the PENDING instructions that need it.
        costs: for each, the index of the entry in `kinds` with the same cost.
        kinds: an instruction and its rank for each different cost.
        partners: the partners of messages; −1 for the rest.
    """

    graph: Graph
    codes: list[int]
    waits: list[Indices]
    users: dict[int, list[int]]
    costs: list[int]
    kinds: list[tuple[Instruction, int]]
    partners: list[int]


def flat_program(program: Program) -> FlatProgram:
    """The flat form of a program, kept with it."""
    return program.once("flat", lambda: _build(dependency_graph(program)))


def _build(graph: Graph) -> FlatProgram:
    computes = [i.op in WORK_OPS for i in graph.instructions]
    waits = [tuple([p for p in preds if not computes[p]]) if preds else () for preds in graph.preds]
    work, wait, message, pending = map(int, Code)
    codes = []
    users: dict[int, list[int]] = {}
    costs = []
    kinds: list[tuple[Instruction, int]] = []
    index: dict[tuple[object, ...], int] = {}
    for number, (i, rank, needed) in enumerate(zip(graph.instructions, graph.ranks, waits, strict=True)):
        if computes[number]:
            codes.append(wait if needed else work)
        elif i.op in MESSAGE_OPS and not needed:
            codes.append(message)
        else:
            codes.append(pending)
            for pred in needed:
                users.setdefault(pred, []).append(number)
        # Micro-batch and version change no cost.
        key = (i.op, i.stage, rank, i.kind, i.peer, i.tier)
        cost = index.get(key)
        if cost is None:
            cost = index[key] = len(kinds)
            kinds.append((i, rank))
        costs.append(cost)
    partners = [-1] * len(codes)
    for number, partner in graph.partner.items():
        partners[number] = partner
        if codes[partner] == pending or number in users or partner in users:
            codes[number] = codes[partner] = pending
    return FlatProgram(graph, codes, waits, users, costs, kinds, partners)
