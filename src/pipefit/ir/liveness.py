"""Is held: from which instruction to which each value occupies memory on its rank.

The same law serves the verifier (memory against a capacity), the simulator (memory over time), the planner and the
runtime (when to let go). A value is held from the instruction that makes it to the last one that needs it; a version
of weights until it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.ir.values import SAVED, WEIGHTS, Value, consumes, makes, needs

__all__ = ["Lifetime", "is_in_place", "lifetimes", "peak", "peak_at", "peak_inflight", "weight_versions"]


class Lifetime(NamedTuple):
    """A value of a rank, and the indices in the rank's list between which it is held.

    Attributes:
        value: what is held.
        born: the instruction that makes it (−1: there at the start).
        dies: the last that needs it (the length of the list: still there at the end).
    """

    value: Value
    born: int
    dies: int


def is_in_place(instructions: Sequence[Instruction], index: int) -> bool:
    """Whether a `step` may overwrite its weights: the next instruction drops the version it starts from."""
    this, after = instructions[index], instructions[index + 1 : index + 2]
    return bool(after) and after[0].op is Op.DROP and (after[0].stage, after[0].version) == (this.stage, this.version)


def lifetimes(program: Program, rank: int) -> list[Lifetime]:
    """Every value of a rank, by birth.

    A step in place makes no second copy: its new version is born after the drop; that of a spilled stage after the
    step. What is evicted and fetched again has a lifetime for each stay. They are found once and kept with the program.
    """
    kept: dict[int, list[Lifetime]] = program.__dict__.setdefault("_lifetimes", {})
    if rank not in kept:
        kept[rank] = _find_lifetimes(program, rank)
    return kept[rank]


def _find_lifetimes(program: Program, rank: int) -> list[Lifetime]:
    instructions = program.ranks[rank]
    header = program.header
    born = {Value(WEIGHTS, stage, 0): -1 for stage in header.stages_of(rank) if not header.is_spilled(stage)}
    dies: dict[Value, int] = {}
    done: list[Lifetime] = []
    for index, instruction in enumerate(instructions):
        for value in needs(instruction, program, rank):
            dies[value] = index
        spilled = header.is_spilled(instruction.stage)
        in_slot = instruction.op is Op.STEP and spilled
        if in_slot or instruction.op is Op.EVICT or (instruction.op is Op.DROP and spilled):
            gone = [value for value in consumes(instruction, program) if value in born]
            done += [Lifetime(value, born.pop(value), index) for value in gone]
        for value in makes(instruction, program, rank):
            if value in born and value.kind == WEIGHTS:
                done.append(Lifetime(value, born[value], dies.get(value, index)))
                del born[value]
            if value not in born:
                in_place = instruction.op is Op.STEP and is_in_place(instructions, index)
                born[value] = index + (1 if in_slot else 2 * in_place)
    dropped = {Value(WEIGHTS, i.stage, i.version) for i in instructions if i.op in (Op.DROP, Op.EVICT)}
    for value, start in born.items():
        forgotten = value.kind != WEIGHTS or value in dropped
        done.append(Lifetime(value, start, dies.get(value, start) if forgotten else len(instructions)))
    return sorted(done, key=lambda life: (life.born, life.value))


def peak(lives: Sequence[Lifetime], size: Callable[[Value], float]) -> float:
    """The highest sum of sizes held at any instruction; what an instruction makes and needs is held together."""
    return peak_at(lives, size)[0]


def peak_at(lives: Sequence[Lifetime], size: Callable[[Value], float]) -> tuple[float, int]:
    """The highest sum of sizes held at any instruction, and the first instruction where it is (−1: the start)."""
    changes: list[tuple[int, int, float]] = []
    for life in lives:
        amount = size(life.value)
        if amount:
            changes += [(life.born, 0, amount), (life.dies, 1, -amount)]
    held = highest = 0.0
    where = -1
    for index, _, amount in sorted(changes, key=lambda change: change[:2]):
        held += amount
        if held > highest:
            highest, where = held, index
    return highest, where


def peak_inflight(program: Program, rank: int) -> float:
    """The most activations a rank holds at once, in micro-batches of that rank's layers: a chunk counts 1/v."""
    share = 1 / max(len(program.header.stages_of(rank)), 1)
    return peak([life for life in lifetimes(program, rank) if life.value.kind == SAVED], lambda value: share)


def weight_versions(program: Program, rank: int) -> int:
    """The most versions of one stage's weights that a rank holds at once."""
    lives = [life for life in lifetimes(program, rank) if life.value.kind == WEIGHTS]
    return max(
        (
            int(peak([life for life in lives if life.value.stage == s], lambda value: 1.0))
            for s in {x.value.stage for x in lives}
        ),
        default=0,
    )
