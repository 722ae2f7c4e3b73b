"""Spilling: stages are kept on the host or on disk, and fetched into the slots of a device when they are needed.

    fetch 0 | F0.0 F0.1 | drop 0, fetch 2 ...     slot 0
    fetch 1 |           | F1.0 F1.1 | drop 1 ...  slot 1

The order in which a rank visits its stages is known before the run. So the stage that leaves a slot is the one whose
next visit is farthest (no choice loads less often: Belady, IBM Systems Journal 5(2), 1966), and the next one is loaded
as soon as the slot is free, while the rank computes with another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Indices, Instruction, Instructions, StageNumbers
from pipefit.ir.op import COMPUTE_OPS, FORWARD_OPS, GRADIENT_OPS, MESSAGE_OPS, WEIGHT_GRADIENT_OPS, Kind, Op, Reduction
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.spill import Spill
from pipefit.ir.values import reduced_stages
from pipefit.passes.places import computes_back, inserted, last_backwards
from pipefit.passes.stays import Stay, stays, stays_until
from pipefit.passes.versions import step_of, steps_at_once

_USES = COMPUTE_OPS | {Op.STEP}
_ON_GRADIENTS = WEIGHT_GRADIENT_OPS | {Op.STEP, Op.REDUCE}
_AHEAD = 4


def with_spilling(program: Program, prefetch: int | None = None) -> Program:
    """Adds the fetches, evictions and drops of a program whose header names stages on another tier.

    Only changed values are written back. A stage steps directly after its last backward, while it is on the device.
    Where this is impossible its gradients are evicted too and it is visited again: under clipping, which first needs
    the norm of all gradients, and for stages that share a weight. A forward whose backward falls into another stay of
    the stage is replayed there, unless the stage keeps the tensors that autograd saved (`Spill.keeps`).

    Args:
        program: complete except for steps and drops of its spilled stages; of a schedule that flushes.
        prefetch: number of stages ahead that the next is loaded (None: as soon as a slot is free; 0: when it is needed:
            synchronous loading, the baseline of double buffering).

    Raises:
        ScheduleError: the schedule does not flush, or needs more stages at once than there are slots.
    """
    spill = program.header.spill
    if spill is None:
        return program
    if program.header.weights is not WeightRule.FLUSH:
        raise ScheduleError(
            f"{program.header.schedule}: spilling needs a schedule that flushes: with several versions of the weights "
            "alive every one of them would need a slot; use a synchronous schedule, such as 1f1b or interleaved"
        )
    if any(map(program.header.is_sharded, spill.stages)):
        raise ScheduleError(
            f"{program.header.schedule}: a spilled stage steps as a whole: spilling and a sharded optimizer do not go "
            "together"
        )
    ranks = []
    for rank, instructions in enumerate(program.ranks):
        listed = _finished_at_once(program.header, rank, instructions)
        listed = _replayed(program.header, rank, listed)
        ranks.append(_with_copies(program.header, rank, listed, prefetch))
    return program.with_ranks(ranks)


def _finished_at_once(header: Header, rank: int, listed: Instructions) -> list[Instruction]:
    """Adds the step of each spilled stage, or its part of the norm, at the point where its gradients are complete."""
    ready = last_backwards(header, listed)
    first_uses: StageNumbers = {}
    for index, i in enumerate(listed):
        if i.op is Op.REDUCE and i.kind != Reduction.NORM:
            for stage in reduced_stages(header, i.kind, i.stage, rank):
                ready[stage, i.version] = index
        if i.op in COMPUTE_OPS:
            first_uses.setdefault((i.stage, i.version), index)
    begins = set()
    for (stage, version), index in first_uses.items():
        if version and steps_at_once(header, stage):
            begins.add(index)
    after = defaultdict(list)
    for (stage, update), index in ready.items():
        if header.is_spilled(stage):
            if steps_at_once(header, stage):
                done = step_of(header, stage, update)
            else:
                done = Instruction(Op.REDUCE, stage, version=update, kind=Reduction.NORM.value)
            place = _past_messages(listed, index + 1)
            if place in begins:
                # Receives of the next update are posted after the step.
                while listed[place - 1].op is Op.RECV:
                    place -= 1
            after[place].append(done)
    return inserted(listed, after)


def _past_messages(listed: Instructions, index: int) -> int:
    """The place after the messages that follow, because other ranks wait for those."""
    while index < len(listed) and listed[index].op in MESSAGE_OPS:
        index += 1
    return index


def _visited(header: Header, rank: int, i: Instruction) -> Indices:
    """The spilled stages that must be in slots for an instruction."""
    stages: Iterable[int] = ()
    if i.op is Op.REDUCE and i.stage >= 0:
        stages = reduced_stages(header, i.kind, i.stage, rank)
    elif i.op in _USES:
        stages = (i.stage,)
    return tuple(filter(header.is_spilled, stages))


def _weight_stays(header: Header, rank: int, listed: list[Instruction]) -> list[Stay]:
    assert header.spill is not None
    # Weights that step on the host become stale on the device.
    return stays_until(listed, partial(_visited, header, rank), Op.HOST_STEP, header.spill.weights_slots)


def _numbers(found: Sequence[Stay]) -> StageNumbers:
    """The number of the stay to which a visit of a stage belongs."""
    numbers = {}
    for number, stay in enumerate(found):
        for index in stay.visits:
            numbers[index, stay.stage] = number
    return numbers


def _replayed(header: Header, rank: int, listed: list[Instruction]) -> list[Instruction]:
    """Adds the replays that are due because a forward and its backward fall into different stays."""
    assert header.spill is not None
    keeps = header.spill.keeps
    stay_of = _numbers([stay for stay in _weight_stays(header, rank, listed) if stay.stage not in keeps])
    kept: StageNumbers = {}
    result = []
    for index, i in enumerate(listed):
        stay = stay_of.get((index, i.stage), -1)
        has_left = kept.get((i.stage, i.mb), stay) != stay
        if i.op in FORWARD_OPS:
            kept[i.stage, i.mb] = stay
        elif i.op in GRADIENT_OPS and has_left:
            result.append(Instruction(Op.RECOMPUTE, i.stage, i.mb, i.version))
            kept[i.stage, i.mb] = stay
        elif i.op is Op.BWD_WEIGHT and has_left:
            raise ScheduleError(
                f"{header.schedule}: stage {i.stage} would leave the device between the two halves of the backward of "
                f"micro-batch {i.mb}; give it more slots, or use a schedule with full backwards"
            )
        result.append(i)
    return result


class _Placed(NamedTuple):
    """An instruction that copies, with its place among the others.

    Attributes:
        place: the index of the instruction of the rank before which it comes.
        fills: whether it fills a slot: freeing a slot comes before filling it.
        needed: the index of the instruction that waits for it. Fetches come in the order in which they are needed, and
            the evictions that free their slots likewise: where copies bind, the one that is waited for comes first.
        instruction: the instruction itself.
    """

    place: int
    fills: bool
    needed: int
    instruction: Instruction


def _with_copies(header: Header, rank: int, listed: list[Instruction], prefetch: int | None) -> list[Instruction]:
    """The list with the instructions that fill and free slots."""
    assert header.spill is not None
    weights = _weight_stays(header, rank, listed)
    _carry(header, listed, weights)
    moved = [(Kind.WEIGHTS, weights)]
    if header.spill.optim_slots:
        steps = [(n, (i.stage,)) for n, i in enumerate(listed) if i.op is Op.STEP and header.is_spilled(i.stage)]
        states = stays(steps, header.spill.optim_slots)
        for stay in states:
            stay.version = listed[stay.first].version
            stay.left = listed[stay.last].version + 1
        moved.append((Kind.OPTIM, states))
    placed = []
    ahead: list[Stay] = []
    for kind, found in moved:
        _set_starts(listed, found, prefetch, ahead)
        placed += _moved(header.spill, kind, listed, found, at_need=prefetch == 0)
        ahead = found
    if header.spill.activations:
        placed += _parked(header.spill, listed, weights, prefetch)
    placed.sort(key=itemgetter(0, 1, 2))
    at = defaultdict(list)
    for one in placed:
        at[one.place].append(one.instruction)
    return inserted(listed, at)


def _moved(spill: Spill, kind: Kind, listed: list[Instruction], found: list[Stay], at_need: bool) -> list[_Placed]:
    """The instructions that move values of one kind to and from the slots.

    Args:
        spill: what the program spills, and where to.
        kind: the kind of the values.
        listed: the instructions of the rank.
        found: the stays of the values.
        at_need: whether a slot is freed only when another stay needs it.
    """
    placed = []
    following = {stay.before: stay for stay in found}
    for stay in found:
        for i in _filling(spill, kind, stay):
            placed.append(_Placed(stay.start, True, stay.first, i))
        place = _past_messages(listed, stay.last + 1)
        needed = len(listed)
        if stay in following:
            needed = following[stay].first
            if at_need and not stay.goes_at_once:
                place = following[stay].start
        for i in _freeing(spill, kind, stay):
            placed.append(_Placed(place, False, needed, i))
    return placed


def _parked(spill: Spill, listed: list[Instruction], found: list[Stay], prefetch: int | None) -> list[_Placed]:
    """Moves the input of a stage to the tier until its replay, where the replay is in another stay of the stage.

    It is fetched a few computations earlier: the replays and backwards of two micro-batches.
    """
    stay_of = _numbers(found)
    forward = {}
    placed = []
    for index, i in enumerate(listed):
        if i.op is Op.FWD:
            forward[i.stage, i.mb] = index
        if i.op is not Op.RECOMPUTE or i.stage == 0:
            continue
        before = forward.get((i.stage, i.mb))
        if before is None or stay_of.get((before, i.stage)) == stay_of.get((index, i.stage)):
            continue
        out = _past_messages(listed, before + 1)
        back = index
        if prefetch != 0:
            back = max(computes_back(listed, index, _AHEAD), out)
        evict = Instruction(Op.EVICT, i.stage - 1, version=i.mb, kind=Kind.ACT.value, tier=spill.tier)
        placed.append(_Placed(out, False, index, evict))
        placed.append(_Placed(back, True, index, replace(evict, op=Op.FETCH)))
    return placed


def _set_starts(listed: list[Instruction], found: list[Stay], prefetch: int | None, ahead: Iterable[Stay]) -> None:
    """Sets the index before which each stay is fetched: no earlier than its slot is free, and in the order of need.

    Args:
        listed: the instructions of the rank.
        found: the stays.
        prefetch: see `with_spilling`.
        ahead: others that come first where they are needed first.
    """
    stepped = _host_steps(listed)
    start = 0
    for number, stay in enumerate(found):
        if stay.before:
            start = max(start, _past_messages(listed, stay.before.last + 1))
        for other in ahead:
            if other.first < stay.first:
                start = max(start, other.start)
        if prefetch is not None and number >= prefetch:
            start = max(start, found[number - prefetch].first)
        if stay.version and stay.stage in stepped:
            step = stepped[stay.stage][stay.version - 1]
            start = max(start, step + 1)
        stay.start = start


def _carry(header: Header, listed: list[Instruction], found: Iterable[Stay]) -> None:
    """Sets for each stay the version that is loaded and evicted, and the partial gradient sums that move with it."""
    version = defaultdict(int)
    summing: dict[int, int] = {}
    stepped = _host_steps(listed)
    for stay in found:
        stage = stay.stage
        if stage in stepped:
            version[stage] = bisect_left(stepped[stage], stay.first)
            if summing.get(stage, version[stage]) < version[stage]:
                del summing[stage]
        mine = [listed[index] for index in stay.visits]
        stay.version = version[stage]
        if stage in summing and any(i.op in _ON_GRADIENTS for i in mine):
            stay.gradients = summing[stage]
        here = stay.gradients >= 0
        for i in mine:
            if i.op in WEIGHT_GRADIENT_OPS:
                summing[stage] = header.update_of(stage, i.mb)
                here = True
            elif i.op is Op.STEP:
                version[stage] = i.version + 1
                here = False
                summing.pop(stage, None)
        stay.left = version[stage]
        stay.gradients_left = -1
        if here:
            stay.gradients_left = summing[stage]


def _host_steps(listed: list[Instruction]) -> dict[int, list[int]]:
    """The indices of each stage's steps on the host."""
    found: dict[int, list[int]] = {}
    for index, i in enumerate(listed):
        if i.op is Op.HOST_STEP:
            found.setdefault(i.stage, []).append(index)
    return found


def _filling(spill: Spill, kind: Kind, stay: Stay) -> list[Instruction]:
    """The instructions that load a stay's values."""
    fetch = Instruction(Op.FETCH, stay.stage, version=stay.version, kind=kind.value, tier=spill.tier, slot=stay.slot)
    if stay.gradients < 0:
        return [fetch]
    return [fetch, replace(fetch, version=stay.gradients, kind=Kind.WGRAD.value)]


def _freeing(spill: Spill, kind: Kind, stay: Stay) -> list[Instruction]:
    """The instructions that write back changed values and drop the others."""
    evict = Instruction(Op.EVICT, stay.stage, version=stay.left, kind=kind.value, tier=spill.tier)
    result = []
    if stay.gradients_left >= 0:
        result.append(replace(evict, version=stay.gradients_left, kind=Kind.WGRAD.value))
    if stay.left != stay.version:
        result.append(evict)
    else:
        result.append(Instruction(Op.DROP, stay.stage, version=stay.version))
    return result
