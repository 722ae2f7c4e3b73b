"""The tables that a rank looks up while it runs a program, computed once from the dependency graph and liveness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipefit.ir.graph import dependency_graph
from pipefit.ir.instruction import Instruction
from pipefit.ir.liveness import is_in_place, lifetimes
from pipefit.ir.op import OP_SPEC, WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Program
from pipefit.ir.values import ACT, GRAD, INPUT

SUMMED = (Reduction.REPLICAS.value, Reduction.SCATTER.value)
"""Reductions of gradients over the replicas of a stage."""


@dataclass(frozen=True)
class CompiledRank:
    """One rank's list, with the values that each instruction waits for and frees.

    Attributes:
        program: of all ranks.
        rank: of the list.
        instructions: the list.
        awaits: for each instruction, the earlier receives, reductions and fetches it must wait for (each is waited for
            once).
        awaited_at_end: those that only the next pass waits for, such as gathers of new weights.
        frees: for each instruction, the values that the rank does not need after it: kind, stage and micro-batch.
        in_place: the steps that may overwrite their weights.
        early: reductions over replicas that may begin inside an update's last backward of their stage, by its index.
    """

    program: Program
    rank: int
    instructions: tuple[Instruction, ...]
    awaits: tuple[tuple[int, ...], ...]
    awaited_at_end: tuple[int, ...]
    frees: tuple[tuple[tuple[str, int, int], ...], ...]
    in_place: frozenset[int]
    early: Mapping[int, Instruction]

    def part(self, first: int, end: int) -> CompiledRank:
        """The instructions from `first` to before `end` as a list; no transfer may cross its ends."""

        def inside(indices: Iterable[int]) -> tuple[int, ...]:
            return tuple(index - first for index in indices if first <= index < end)

        return CompiledRank(
            self.program,
            self.rank,
            self.instructions[first:end],
            tuple(inside(indices) for indices in self.awaits[first:end]),
            inside(self.awaited_at_end),
            self.frees[first:end],
            frozenset(inside(self.in_place)),
            {index - first: reduce for index, reduce in self.early.items() if first <= index < end},
        )


def compile_rank(program: Program, rank: int) -> CompiledRank:
    """The tables of the executor for one rank; kept with the program."""
    cache: dict[int, CompiledRank] = program.__dict__.setdefault("_compiled", {})
    if rank not in cache:
        cache[rank] = _compile(program, rank)
    return cache[rank]


def _compile(program: Program, rank: int) -> CompiledRank:
    graph = dependency_graph(program)
    start, end = graph.starts[rank], graph.starts[rank + 1]
    instructions = program.ranks[rank]
    waited: set[int] = set()
    awaits = []
    for number in range(start, end):
        awaited = ((p - start, graph.instructions[p].op) for p in graph.preds[number])
        asynchronous = [index for index, op in awaited if OP_SPEC[op].is_awaited or op is Op.SEND]
        mine = tuple(sorted({index for index in asynchronous if index not in waited}))
        waited.update(mine)
        awaits.append(mine)
    under_way = (index for index, i in enumerate(instructions) if OP_SPEC[i.op].is_awaited)
    at_end = tuple(index for index in under_way if index not in waited)
    frees: list[list[tuple[str, int, int]]] = [[] for _ in instructions]
    for life in lifetimes(program, rank):
        if life.value.kind in (INPUT, ACT, GRAD) and life.dies < len(instructions):
            frees[life.dies].append((life.value.kind, life.value.stage, life.value.at))
    steps = (index for index, i in enumerate(instructions) if i.op is Op.STEP)
    in_place = frozenset(index for index in steps if is_in_place(instructions, index))
    early = _early_reductions(program, rank)
    return CompiledRank(program, rank, instructions, tuple(awaits), at_end, tuple(map(tuple, frees)), in_place, early)


def _early_reductions(program: Program, rank: int) -> dict[int, Instruction]:
    """Reductions without another collective before them, so that the order of the rank's collectives stays the same."""
    found: dict[int, Instruction] = {}
    last: dict[tuple[int, int], int] = {}
    collective = -1
    for index, i in enumerate(program.ranks[rank]):
        if i.op in WEIGHT_GRADIENT_OPS:
            last[i.stage, program.header.update_of(i.stage, i.mb)] = index
        elif i.op in (Op.REDUCE, Op.BARRIER, Op.GATHER):
            before = last.get((i.stage, i.version), -1)
            if i.op is Op.REDUCE and i.kind in SUMMED and before > collective:
                found[before] = i
            collective = index
    return found
