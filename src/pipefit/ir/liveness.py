"""Liveness ("is held"): the first and the last instruction at which each value occupies memory on its rank.

The same law serves the verifier (memory compared with a capacity), the simulator (memory over time), the planner and
the runtime (the moment to free). A value is held from the instruction that makes it to the last one that needs it; a
version of weights until it is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

import msgspec

from pipefit.ir.graph import FEW_SENDS
from pipefit.ir.instruction import Instruction, Instructions, StageAt, StageNumbers
from pipefit.ir.op import COMPUTE_OPS, FORWARD_OPS, OP_SPEC, WEIGHT_GRADIENT_OPS, WHOLE_OF, Op, Reduction, Work
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED
from pipefit.ir.values import ACT, CONSUMES, GRAD, INPUT, MAKES, NEEDS, OPTIM, SAVED, SUMS, WEIGHTS, WGRAD, Value

SUMMED = (Reduction.REPLICAS.value, Reduction.SCATTER.value)
"""Reductions of gradients over the replicas of a stage."""

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
    return program.once(("lifetimes", rank), lambda: _find_lifetimes(program, rank))


def _find_lifetimes(program: Program, rank: int) -> list[Lifetime]:
    instructions = program.ranks[rank]
    header = program.header
    moves = header.moves_values
    lives = {}
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


def working_lifetimes(program: Program, rank: int, summed: bool = False) -> list[Lifetime]:
    """The lifetimes of a rank's values as its processes hold them, and of each instruction's work while it runs.

    What the first backward of an update makes of the gradients of weights is a part of its work; they are held from its
    end on. Those that replicas sum have memory throughout, or where they share them from the beginning of a stage's
    first backward to their `free`. What a replica receives for its part of a sum, it holds until the sum is needed; the
    part has memory of its own from then on. The backward before a sum begins it. A message is held by its sender until
    it must have arrived.

    Args:
        program: that runs.
        rank: whose values they are.
        summed: replicas sum the gradients of every stage, though the program shows one of them.
    """
    return program.once(("working lifetimes", rank, summed), lambda: _find_working(program, rank, summed))


def _find_working(program: Program, rank: int, summed: bool) -> list[Lifetime]:
    header = program.header
    instructions = program.ranks[rank]
    released = _released(program, rank)
    early = early_sums(program, rank)
    firsts = set()
    found, ends = _sums(program, rank, early)
    for life in lifetimes(program, rank):
        value = life.value
        born = life.born
        dies = max(life.dies, released.get(value, born))
        copies = len(header.placement[value.stage])
        is_summed = summed or copies > 1
        if value.kind == SUMS:
            born = ends[value.stage, value.at]
        elif value.kind == WGRAD and header.shares_gradients(value.stage):
            dies = life.dies
        elif value.kind == WGRAD and is_summed:
            if value.at:
                continue
            born = -1
            dies = len(instructions)
        elif value.kind == WGRAD and instructions[born].op is Op.BWD and not header.is_spilled(value.stage):
            firsts.add(born)
            born += 1
            dies = max(born, dies)
        found.append(Lifetime(value, born, dies))
    for index, i in enumerate(instructions):
        stage = i.stage
        kind = _WORK.get(i.op)
        is_replayed = (stage, i.mb) in program.recomputed
        saves_nothing = is_replayed or stage < header.frozen
        if i.op is Op.FWD and saves_nothing:
            kind = Work.BARE
        elif i.op is Op.LOSS:
            stage = header.last_stage
        elif index in firsts:
            kind = Work.FIRST
        elif kind is Work.BACKWARD and index in early:
            kind = Work.LAST
        if kind is not None:
            work = Value(kind.value, stage, index)
            found.append(Lifetime(work, index, index))
    return [*found, *_half_copies(program, rank)]


def _half_copies(program: Program, rank: int) -> list[Lifetime]:
    """The half copies of a rank's weights: from the first forward with a version to the next step or drop of any stage.

    A micro-batch in flight holds those that its forward used for longer. A spilled stage that keeps its saved tensors
    makes them again for its backwards.
    """
    found = []
    present: dict[int, Lifetime] = {}
    used: dict[StageAt, Lifetime] = {}
    kept: Sequence[int] = ()
    if program.header.spill is not None:
        kept = program.header.spill.keeps
    for index, i in enumerate(program.ranks[rank]):
        stage = i.stage
        micro = (stage, i.mb)
        if i.op in (Op.STEP, Op.DROP):
            for unused in present.values():
                unused.dies = max(unused.dies, index - 1)
            present.clear()
        elif i.op in FORWARD_OPS or (i.op in COMPUTE_OPS and stage in kept):
            copies = Value(Work.COPIES.value, stage, i.version)
            life = present.get(stage)
            if life is None or life.value != copies:
                life = Lifetime(copies, index, index)
                present[stage] = life
                found.append(life)
            life.dies = index
            used[micro] = life
        elif i.op in COMPUTE_OPS and micro in used:
            used[micro].dies = index
    return found


def early_sums(program: Program, rank: int) -> dict[int, Instruction]:
    """The sums over replicas that may begin inside an update's last backward of their stage, by its index.

    They have no other collective before them, so that the order of the rank's collectives stays the same.
    """
    found = {}
    last = {}
    collective = -1
    for index, i in enumerate(program.ranks[rank]):
        stage = i.stage
        if i.op in WEIGHT_GRADIENT_OPS:
            update = program.header.update_of(stage, i.mb)
            last[stage, update] = index
        elif OP_SPEC[i.op].is_collective or i.op is Op.GATHER:
            before = last.get((stage, i.version), -1)
            is_sum = i.op is Op.REDUCE and i.kind in SUMMED
            if is_sum and before > collective:
                found[before] = i
            collective = index
    return found


def _sums(program: Program, rank: int, early: Mapping[int, Instruction]) -> tuple[list[Lifetime], StageNumbers]:
    """The memory of a rank's sums of which it keeps a part, and the index at which the first of each update is needed.

    It is held from the beginning of a sum until its gradients are freed or stepped.
    """
    found = []
    ends: StageNumbers = {}
    under_way = defaultdict(list)
    for index, i in enumerate(program.ranks[rank]):
        stage = i.stage
        if index in early:
            work = Value(Work.EARLY.value, stage, index)
            under_way[stage].append(Lifetime(work, index + 1, index))
        if i.kind == Reduction.SCATTER:
            work = Value(Work.SUM.value, stage, index)
            under_way[stage].append(Lifetime(work, index, index))
        elif i.op in _AFTER_SUM and stage in under_way:
            update = (stage, i.version)
            ends.setdefault(update, index)
            for life in under_way.pop(stage):
                life.dies = index - 1
                found.append(life)
    return found, ends


def _released(program: Program, rank: int) -> dict[Value, int]:
    """Of each value that a rank sends the last instruction before its memory is free.

    The sender knows that a message has arrived when the receiver's answer has: the gradient of an activation, or what
    the receiver makes of a value and sends back. It keeps a few messages of each kind to a rank, and all that are left
    until the end.
    """
    waiting: dict[tuple[int, str], list[Value]] = defaultdict(list)
    found = {}
    instructions = program.ranks[rank]
    for index, i in enumerate(instructions):
        stage = i.stage
        if i.op is Op.SEND:
            kind = WHOLE_OF.get(i.kind, i.kind)
            queue = waiting[i.peer, kind]
            sent = Value(kind, stage, i.mb)
            queue.append(sent)
            if len(queue) > FEW_SENDS:
                oldest = queue.pop(0)
                found[oldest] = index
        elif i.op in FORWARD_OPS:
            _answer(waiting, Value(ACT, stage - 2, i.mb), index - 1, found)
        elif i.op in COMPUTE_OPS:
            _answer(waiting, Value(ACT, stage, i.mb), index - 1, found)
            _answer(waiting, Value(GRAD, stage + 1, i.mb), index - 1, found)
    last = len(instructions) - 1
    for queue in waiting.values():
        found |= dict.fromkeys(queue, last)
    return found


def _answer(waiting: Mapping[tuple[int, str], list[Value]], value: Value, index: int, found: dict[Value, int]) -> None:
    """Notes that a message has arrived, if it was sent, and all before it on its link."""
    for queue in waiting.values():
        if value not in queue:
            continue
        while queue[0] != value:
            earlier = queue.pop(0)
            found[earlier] = index
        del queue[0]
        found[value] = index


_AFTER_SUM = (Op.FREE, Op.STEP)

_WORK = {
    Op.FWD: Work.FORWARD,
    Op.RECOMPUTE: Work.REPLAY,
    Op.BWD: Work.BACKWARD,
    Op.BWD_INPUT: Work.BACKWARD,
    Op.LOSS: Work.LOSS,
    Op.STEP: Work.STEP,
}


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
    of_stage = defaultdict(list)
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


def device_peak_bytes(
    program: Program, rank: int, size: Size, resident_bytes: float = 0.0, lives: Iterable[Lifetime] | None = None
) -> tuple[float, int]:
    """The peak of bytes on a rank's device, and the first instruction where it occurs (−1: the start).

    Slots count whole from beginning to end; all other values while they are held.

    Args:
        program: that runs.
        rank: whose device.
        size: bytes of a value.
        resident_bytes: held in addition to values: the states of optimizers that are not moved.
        lives: of the rank; None: its values, without the work of instructions.
    """
    header = program.header
    if lives is None:
        lives = lifetimes(program, rank)
    highest, index = peak_at([life for life in lives if not lies_in_slot(header, life.value)], size)
    return highest + arena_bytes(header, rank, size) + resident_bytes, index


def tier_peak_bytes(program: Program, rank: int, size: Size) -> tuple[float, int]:
    """The peak of bytes on a rank's tier, and the first instruction where it occurs (−1: the start).

    Weights and states take their space there throughout, and so do the gradients of stages that step there; other
    gradients and activations from their first eviction on. One copy of each is counted. A disk that keeps two, so that
    a partial write loses nothing, needs twice as much for weights and states.
    """
    header = program.header
    homes = set()
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
