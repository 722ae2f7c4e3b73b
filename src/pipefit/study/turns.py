"""A trial's step as a program of one rank, and the places where another device may go on with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.values import Value, consumes, makes, needs
from pipefit.schedules import Shape, find
from pipefit.verify import verify

__all__ = ["Turn", "replays", "step_program", "turns_of"]

_CARRIED = frozenset({Kind.ACT, Kind.GRAD, Kind.INPUT, Kind.WGRAD, Kind.NORM})
"""What may wait on the tier between two turns. Weights and optimizer states lie there anyway."""
_LASTING = frozenset({Kind.WEIGHTS, Kind.OPTIM})


class Turn(NamedTuple):
    """Consecutive instructions of one shard, between which the rank lets nothing go to another.

    Attributes:
        stage: the shard.
        first, end: its instructions are program.ranks[0][first:end].
        takes: values from earlier turns, in order.
        leaves: values for later turns, in order.
        steps: whether the shard's optimizer steps in it.
    """

    stage: int
    first: int
    end: int
    takes: tuple[Value, ...]
    leaves: tuple[Value, ...]
    steps: bool


@functools.cache
def step_program(num_shards: int, num_microbatches: int, clip: bool = False) -> Program:
    """One step of a model in shards on one device: the schedule `spilled`, without its copies.

    All micro-batches of a shard come before the next shard; at the last each micro-batch turns around at once; a shard
    steps as soon as its gradients are complete. What `fetch` and `evict` do in that schedule happens here between
    turns, where the next may be of another trial or on another device. Clipping by the global norm puts all steps after
    the last backward: every shard then comes once more, with its gradients.
    """
    shape = Shape(1, num_microbatches, num_shards, recompute=None, clip=clip)
    program = replace(find("spilled"), spills=False)(shape)
    program = program if clip else _with_early_steps(program)
    verify(program).raise_if_bad()
    return program


def _with_early_steps(program: Program) -> Program:
    """Each step, with the drop of what it replaces, right after its shard's last backward."""
    (instructions,) = program.ranks
    late = [i for i in instructions if i.op in (Op.STEP, Op.DROP)]
    rest = [i for i in instructions if i.op not in (Op.STEP, Op.DROP)]
    ends = {i.stage: index for index, i in enumerate(rest) if i.op is Op.BWD}
    listed: list[Instruction] = []
    for index, i in enumerate(rest):
        listed.append(i)
        if i.op is Op.BWD and ends[i.stage] == index:
            listed += [own for own in late if own.stage == i.stage]
    return program.with_ranks([listed])


@functools.cache
def turns_of(program: Program) -> tuple[Turn, ...]:
    """The program of one rank, cut wherever another device could go on: at a change of shard with nothing else held.

    What autograd saves cannot be moved, so a shard whose forward is followed by its own backward is one turn.
    """
    (instructions,) = program.ranks
    held = _held_after(program)
    cuts = [0]
    for index in range(1, len(instructions)):
        before, after = _shard(instructions, index - 1, -1), _shard(instructions, index, 1)
        if before != after and all(value.kind in _CARRIED or value.kind in _LASTING for value in held[index - 1]):
            if instructions[index].op is not Op.REDUCE:  # the norm belongs to the turn that completes it
                cuts.append(index)
    return tuple(_turn(program, first, end) for first, end in zip(cuts, [*cuts[1:], len(instructions)], strict=True))


def _shard(instructions: tuple[Instruction, ...], index: int, towards: int) -> int:
    """The shard of an instruction; of one that has none, that of the nearest in a direction."""
    while 0 <= index < len(instructions):
        i = instructions[index]
        if i.op is Op.LOSS:
            return max(other.stage for other in instructions)
        if i.stage >= 0:
            return i.stage
        index += towards
    return -1


def _held_after(program: Program) -> list[frozenset[Value]]:
    """For each instruction, what lies on the rank after it and is needed later."""
    (instructions,) = program.ranks
    last_use: dict[Value, int] = {}
    for index, i in enumerate(instructions):
        for value in needs(i, program, 0):
            last_use[value] = index
    held: set[Value] = set()
    result = []
    for index, i in enumerate(instructions):
        held |= set(makes(i, program, 0))
        held -= set(consumes(i, program, 0))
        held = {value for value in held if last_use.get(value, -1) > index}
        result.append(frozenset(held))
    return result


def _turn(program: Program, first: int, end: int) -> Turn:
    (instructions,) = program.ranks
    made: set[Value] = set()
    taken: dict[Value, None] = {}
    for i in instructions[first:end]:
        taken |= {v: None for v in needs(i, program, 0) if v not in made and v.kind not in _LASTING}
        made |= set(makes(i, program, 0))
    later = {v for i in instructions[end:] for v in needs(i, program, 0)}
    gone = {v for i in instructions[first:end] for v in consumes(i, program, 0)}
    leaves = sorted(v for v in made & later - gone if v.kind not in _LASTING and v.kind != Kind.INPUT)
    steps = any(i.op is Op.STEP for i in instructions[first:end])
    return Turn(_shard(instructions, first, 1), first, end, tuple(taken), tuple(leaves), steps)


def replays(program: Program, turn: Turn) -> Iterator[Instruction]:
    """The loads that a turn repeats, for batches are drawn anew rather than kept."""
    for value in turn.takes:
        if value.kind == Kind.INPUT:
            yield Instruction(Op.LOAD, value.stage, value.at)
