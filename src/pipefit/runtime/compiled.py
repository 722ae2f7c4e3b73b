"""The tables that a rank looks up while it runs a program, computed once from the dependency graph and liveness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipefit.ir.graph import dependency_graph
from pipefit.ir.instruction import Indices, Instruction, ValueKey
from pipefit.ir.liveness import early_sums, is_in_place, lifetimes
from pipefit.ir.op import OP_SPEC, Op
from pipefit.ir.program import Program
from pipefit.ir.values import ACT, GRAD, INPUT


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
        partial: the sums of shared gradients that others of their update follow.
        early: see `early_sums`.
    """

    program: Program
    rank: int
    instructions: tuple[Instruction, ...]
    awaits: tuple[Indices, ...]
    awaited_at_end: Indices
    frees: tuple[tuple[ValueKey, ...], ...]
    in_place: frozenset[int]
    partial: frozenset[int]
    early: Mapping[int, Instruction]


def compile_rank(program: Program, rank: int) -> CompiledRank:
    """The tables of the executor for one rank; kept with the program."""
    cache: dict[int, CompiledRank] = program.__dict__.setdefault("_compiled", {})
    if rank not in cache:
        cache[rank] = _compile(program, rank)
    return cache[rank]


def _compile(program: Program, rank: int) -> CompiledRank:
    instructions = program.ranks[rank]
    awaits, at_end = _awaited(program, rank)
    frees: list[list[ValueKey]] = [[] for _ in instructions]
    for value, dies in ((life.value, life.dies) for life in lifetimes(program, rank)):
        if value.kind in (INPUT, ACT, GRAD) and dies < len(instructions):
            frees[dies].append((value.kind, value.stage, value.at))
    steps = (index for index, i in enumerate(instructions) if i.op is Op.STEP)
    return CompiledRank(
        program=program,
        rank=rank,
        instructions=instructions,
        awaits=awaits,
        awaited_at_end=at_end,
        frees=tuple(map(tuple, frees)),
        in_place=frozenset(index for index in steps if is_in_place(instructions, index)),
        partial=_partial_sums(instructions),
        early=early_sums(program, rank),
    )


def _awaited(program: Program, rank: int) -> tuple[tuple[Indices, ...], Indices]:
    """The waits of each instruction, and those that are left for the end."""
    graph = dependency_graph(program)
    start = graph.starts[rank]
    instructions = program.ranks[rank]
    under_way = {index for index, i in enumerate(instructions) if OP_SPEC[i.op].is_awaited}
    sends = {index for index, i in enumerate(instructions) if i.op is Op.SEND}
    waiting = under_way | sends
    awaits = []
    for number in range(start, graph.starts[rank + 1]):
        mine = waiting.intersection(p - start for p in graph.preds[number])
        waiting -= mine
        awaits.append(tuple(sorted(mine)))
    return tuple(awaits), tuple(sorted(under_way & waiting))


def _partial_sums(instructions: tuple[Instruction, ...]) -> frozenset[int]:
    """The sums of a stage's gradients that are followed by others of the same update."""
    last: dict[Instruction, int] = {}
    found = set()
    for index, i in enumerate(instructions):
        if i.op is Op.REDUCE:
            if i in last:
                found.add(last[i])
            last[i] = index
    return frozenset(found)
