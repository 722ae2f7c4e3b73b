"""Liveness ("is held"): the first and the last instruction at which each value occupies memory on its rank.

The same law serves the verifier (memory compared with a capacity), the simulator (memory over time), the planner and
the runtime (the moment to free). A value is held from the instruction that makes it to the last one that needs it; a
version of weights until it is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter

import msgspec

from pipefit.ir.instruction import Instructions
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED
from pipefit.ir.values import ACT, CONSUMES, INPUT, MAKES, NEEDS, OPTIM, SAVED, WEIGHTS, WGRAD, Value

Size = Callable[[Value], float]
"""Bytes, or another measure, of a value."""


class Lifetime(msgspec.Struct, gc=False):
    """A value of a rank, and the indices in the rank's list between which it is held.

    Attributes:
        value: the value held.
        born: the instruction that makes it (−1: there at the start).
        dies: the last that needs it (the length of the list: still there at the end).
    """

    value: Value
    born: int
    dies: int


def is_in_place(instructions: Instructions, index: int) -> bool:
    """Returns whether a `step` may overwrite its weights: the next instruction drops the version it starts from."""
    if index + 1 == len(instructions):
        return False
    this = instructions[index]
    after = instructions[index + 1]
    return after.op is Op.DROP and after.stage == this.stage and after.version == this.version


def lifetimes(program: Program, rank: int) -> list[Lifetime]:
    """Every value of a rank, by birth.

    A step in place makes no second copy: its new version is born after the drop; that of a spilled stage after the
    step. A value that is evicted and fetched again has a lifetime for each stay. The list is kept with the program.
    """
    kept: dict[int, list[Lifetime]] = program.__dict__.setdefault("_lifetimes", {})
    if rank not in kept:
        kept[rank] = _find_lifetimes(program, rank)
    return kept[rank]


def _find_lifetimes(program: Program, rank: int) -> list[Lifetime]:
    instructions = program.ranks[rank]
    header = program.header
    moves = header.spill is not None or header.shard in ("gradients", "weights")
    lives: dict[Value, Lifetime] = {}
    for stage in header.stages_of(rank):
        if header.is_resident(stage):
            value = Value(WEIGHTS, stage, 0)
            lives[value] = Lifetime(value, -1, -1)
    ended = []
    step = Op.STEP
    drop = Op.DROP
    frees = (Op.EVICT, Op.FREE)
    for index, instruction in enumerate(instructions):
        op = instruction.op
        for value in NEEDS[op](instruction, program, rank):
            if value in lives:
                lives[value].dies = index
        away = moves and not header.is_resident(instruction.stage)
        birth = index
        if op in frees or (away and (op is step or op is drop)):
            for value in CONSUMES[op](instruction, program, rank):
                if value in lives:
                    ended.append(lives.pop(value))
        if op is step:
            if away:
                birth += 1
            else:
                birth += 2 * is_in_place(instructions, index)
        for value in MAKES[op](instruction, program, rank):
            if value in lives:
                if value.kind != WEIGHTS:
                    continue
                ended.append(lives[value])
            lives[value] = Lifetime(value, birth, birth)
    dropped = {Value(WEIGHTS, i.stage, i.version) for i in instructions if i.op is drop or i.op is Op.EVICT}
    for value in lives.keys() - dropped:
        if value.kind == WEIGHTS:
            lives[value].dies = len(instructions)
    return sorted([*ended, *lives.values()], key=attrgetter("born"))


def peak(lives: Sequence[Lifetime], size: Size) -> float:
    """The highest sum of sizes held at any instruction; the values it needs and those it makes are held together."""
    return peak_at(lives, size)[0]


def peak_at(lives: Sequence[Lifetime], size: Size) -> tuple[float, int]:
    """The highest sum of sizes held at any instruction, and the first instruction where it is (−1: the start)."""
    changes = []
    for life in lives:
        amount = size(life.value)
        if amount:
            changes += [(life.born, 0, amount), (life.dies, 1, -amount)]
    held = highest = 0.0
    where = -1
    for index, _, amount in sorted(changes, key=itemgetter(0, 1)):
        held += amount
        if held > highest:
            highest = held
            where = index
    return highest, where


def peak_inflight(program: Program, rank: int) -> float:
    """Maximum of activations a rank holds at once, in micro-batches of that rank's layers: a chunk counts 1/v."""
    share = 1 / max(len(program.header.stages_of(rank)), 1)
    saved = [life for life in lifetimes(program, rank) if life.value.kind == SAVED]
    return peak(saved, lambda value: share)


def kept_inputs(program: Program, rank: int) -> int:
    """Maximum number of inputs of stages, each of one micro-batch, that a rank holds at once for replays of stages."""
    inputs = set()
    for stage, mb in program.recomputed:
        if rank not in program.header.placement[stage]:
            continue
        if stage:
            inputs.add(Value(ACT, stage - 1, mb))
        else:
            inputs.add(Value(INPUT, 0, mb))
    held = [life for life in lifetimes(program, rank) if life.value in inputs]
    return int(peak(held, lambda value: 1.0))


def weight_versions(program: Program, rank: int) -> int:
    """Maximum number of versions of one stage's weights that a rank holds at once."""
    of_stage: dict[int, list[Lifetime]] = defaultdict(list)
    for life in lifetimes(program, rank):
        if life.value.kind == WEIGHTS:
            of_stage[life.value.stage].append(life)
    most = (peak(lives, lambda value: 1.0) for lives in of_stage.values())
    return int(max(most, default=0))


def lies_in_slot(header: Header, value: Value) -> bool:
    """Returns whether a value is in one of the slots that its rank has for spilled stages."""
    if value.kind == OPTIM:
        return header.is_optim_spilled(value.stage)
    return value.kind in SLOTTED and header.is_spilled(value.stage)


def arena_bytes(header: Header, rank: int, size: Size) -> float:
    """Bytes of the slots of a rank, full or empty: each is as large as the rank's largest spilled stage."""
    own = [stage for stage in header.stages_of(rank) if header.is_spilled(stage)]
    if not own or header.spill is None:
        return 0.0
    total: float = 0
    for kind in SLOTTED:
        values = [Value(kind, stage, 0) for stage in own]
        largest = max((size(value) for value in values if lies_in_slot(header, value)), default=0)
        total += header.spill.slots(kind) * largest
    return total


def device_peak_bytes(program: Program, rank: int, size: Size, resident_bytes: float = 0.0) -> tuple[float, int]:
    """The peak of bytes on a rank's device, and the first instruction where it occurs (−1: the start).

    Slots count whole from beginning to end; all other values while they are held.

    Args:
        program: that runs.
        rank: whose device.
        size: bytes of a value.
        resident_bytes: held in addition to values: the states of optimizers that are not moved.
    """
    header = program.header
    lives = [life for life in lifetimes(program, rank) if not lies_in_slot(header, life.value)]
    highest, index = peak_at(lives, size)
    return highest + arena_bytes(header, rank, size) + resident_bytes, index


def tier_peak_bytes(program: Program, rank: int, size: Size) -> tuple[float, int]:
    """The peak of bytes on a rank's tier, and the first instruction where it occurs (−1: the start).

    Weights and states take their space there throughout, and so do the gradients of stages that step there; other
    gradients and activations from their first eviction on. One copy of each is counted. A disk that keeps two, so that
    a partial write loses nothing, needs twice as much for weights and states.
    """
    header = program.header
    homes: set[tuple[str, int]] = set()
    for stage in header.stages_of(rank):
        if not header.is_spilled(stage):
            continue
        homes.add((WEIGHTS, stage))
        if not header.keeps_states(stage):
            homes.add((OPTIM, stage))
        if header.steps_on_host(stage):
            homes.add((WGRAD, stage))
    held = highest = sum(size(Value(kind, stage, 0)) for kind, stage in sorted(homes))
    where = -1
    there: set[Value] = set()
    for index, i in enumerate(program.ranks[rank]):
        if i.op not in (Op.FETCH, Op.EVICT) or i.kind == OPTIM or (i.kind, i.stage) in homes:
            continue
        value = Value(i.kind, i.stage, i.version)
        if i.op is Op.FETCH and value in there:
            there.remove(value)
            held -= size(value)
        elif i.op is Op.EVICT and value not in there:
            there.add(value)
            held += size(value)
            if held > highest:
                highest = held
                where = index
    return highest, where
