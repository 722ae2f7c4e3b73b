"""A trial's step as a program of one rank, split into turns: any device may take the next one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.ir.values import MAKES, NEEDS, Value
from pipefit.schedules import Shape, find
from pipefit.verify import verify

_CROSSING = (Kind.ACT, Kind.GRAD, Kind.INPUT)
"""Data that waits on the tier from one turn to a later one; inputs of the model are loaded again."""

_Parts = list[list[Instruction]]
"""The instructions of each turn."""


class Turn(NamedTuple):
    """Consecutive instructions that begin with a shard's fetch and end with its eviction.

    Attributes:
        stage: the shard.
        first, end: its instructions are program.ranks[0][first:end].
        steps: whether the shard's optimizer steps in it.
    """

    stage: int
    first: int
    end: int
    steps: bool


@functools.cache
def step_program(num_shards: int, num_microbatches: int, clip: bool = False, num_slots: int = 1) -> Program:
    """One step of a model in shards on one device: the schedule `spilled`, with all state on the tier between turns.

        fetch 0 F0.0 F0.1 drop 0 | fetch 1 F1.0 B1.0 F1.1 B1.1 S1 evict 1 | fetch 0 B0.0 B0.1 S0 evict 0

    F forward, B backward with its replay, S step, digits after the point micro-batches, | the end of a turn. At its end
    a turn evicts the activations and gradients that cross the cut, and a later turn fetches them. S shards have 2S - 1
    turns. Clipping by the global norm puts all steps but the first shard's after the last backward: every other shard
    then has one more turn, with its gradients.

    Args:
        num_shards: stages of the program.
        num_microbatches: of the step.
        clip: whether gradients are clipped by their global norm.
        num_slots: 1, or one for each shard, which then keeps its weights there.
    """
    spill = Spill.of(num_shards, 1, 1, "disk")
    program = find("spilled")(Shape(1, num_microbatches, num_shards, clip=clip, spill=spill, prefetch=0))
    turns = _crossing(program, _closed(_split(program.ranks[0])))
    program = program.with_ranks([[i for turn in turns for i in turn]])
    if num_slots > 1:
        program = _in_own_slots(program)
    verify(program).raise_if_bad()
    return program


@functools.cache
def turns_of(program: Program) -> tuple[Turn, ...]:
    """The turns of a program that `step_program` has made."""
    found = []
    first = 0
    for turn in _split(program.ranks[0]):
        end = first + len(turn)
        stage = next(i.stage for i in turn if _is_arrival(i))
        found.append(Turn(stage, first, end, any(i.op is Op.STEP for i in turn)))
        first = end
    return tuple(found)


def _is_arrival(i: Instruction) -> bool:
    return i.op is Op.FETCH and i.kind == Kind.WEIGHTS


def _split(instructions: Iterable[Instruction]) -> _Parts:
    """Splits a list before each fetch of a shard's weights; with one slot nothing is on the device then."""
    turns = []
    waiting: list[Instruction] = []
    for i in instructions:
        if _is_arrival(i):
            turns.append([i, *waiting])
            waiting = []
        elif turns:
            turns[-1].append(i)
        else:
            waiting.append(i)
    return turns


def _closed(turns: _Parts) -> _Parts:
    """Each turn with the eviction of its fetched states, which the pass would leave to a later turn."""
    evictions = [i for turn in turns for i in turn if i.op is Op.EVICT and i.kind == Kind.OPTIM]
    result = []
    for turn in turns:
        states = [i.stage for i in turn if i.op is Op.FETCH and i.kind == Kind.OPTIM]
        closed = [i for i in turn if i not in evictions]
        closed += [i for i in evictions if i.stage in states]
        result.append(closed)
    return result


def _crossing(program: Program, turns: _Parts) -> _Parts:
    """Adds the evictions and fetches of the data that crosses a cut."""
    made = []
    needed = []
    for turn in turns:
        own = {value for i in turn for value in MAKES[i.op](i, program, 0)}
        used = [value for i in turn for value in NEEDS[i.op](i, program, 0)]
        made.append(own)
        needed.append(dict.fromkeys(value for value in used if value.kind in _CROSSING and value not in own))
    result = []
    for number, turn in enumerate(turns):
        later = set[Value]().union(*needed[number + 1 :])
        # Values that a turn has fetched are dropped at its end, so that nothing stays on the device; the tier has them.
        leaving = sorted((made[number] | needed[number].keys()) & later)
        fetches = [_moved(Op.FETCH, value) for value in needed[number]]
        evictions = [_moved(Op.EVICT, value) for value in leaving]
        result.append([turn[0], *fetches, *turn[1:], *evictions])
    return result


def _moved(op: Op, value: Value) -> Instruction:
    return Instruction(op, value.stage, version=value.at, kind=value.kind, tier="disk")


def _in_own_slots(program: Program) -> Program:
    """Every shard in its own slot, though it leaves at the end of each turn: its bytes are still there."""
    spill = program.header.spill
    assert spill is not None
    count = program.header.num_stages
    header = replace(program.header, spill=replace(spill, weights_slots=count, optim_slots=count))
    slotted = (replace(i, slot=i.stage) if i.slot >= 0 else i for i in program.ranks[0])
    return Program(header, (tuple(slotted),))
