"""Rules `complete` and `ownership`: every instruction is there once, and on its rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from pipefit.ir.instruction import StageAt
from pipefit.ir.op import BACKWARD_OPS, OP_SPEC, STEP_OPS, WEIGHT_GRADIENT_OPS, WORK_OPS, Op
from pipefit.ir.program import Header
from pipefit.ir.values import ACT
from pipefit.verify.subject import Finding, Findings, Subject

_RULE = "complete"
_OWNED = [op for op in Op if op in WORK_OPS and "mb" in OP_SPEC[op].fields]
_HELD = (Op.STEP, Op.DROP, Op.UNSHARD, Op.FREE, Op.FETCH, Op.EVICT)


def ownership(s: Subject) -> Findings:
    """Instructions of a micro-batch are on the rank of the header's rule, others on a rank of their stage."""
    placement = s.header.placement
    ranks = s.graph.ranks
    for stage, mb, number in s.each(*_OWNED):
        owner = s.header.rank_of(stage, mb)
        if ranks[number] != owner:
            yield s.at("ownership", number, f"stage {stage} runs micro-batch {mb} on rank {owner}")
    for stage, _, number in s.each(*_HELD):
        homes = placement[stage]
        # An activation is on the rank that made it, or on one that it was sent to.
        is_activation = s.graph.instructions[number].kind == ACT
        if is_activation and stage < s.header.last_stage:
            homes += placement[stage + 1]
        if ranks[number] not in homes:
            holders = ", ".join(map(str, placement[stage]))
            yield s.at("ownership", number, f"the weights of stage {stage} are on rank {holders}")


def complete(s: Subject) -> Findings:
    """One of each for every stage, micro-batch and update."""
    header = s.header
    split = s.places[Op.BWD_INPUT].keys() | s.places[Op.BWD_WEIGHT].keys()
    for stage in range(header.num_stages):
        for mb in range(header.total_microbatches):
            for op in _due(header, stage, is_split=(stage, mb) in split):
                numbers = s.places[op].get((stage, mb), ())
                if len(numbers) != 1:
                    yield from _not_one(s, op, stage, mb, numbers)
    for stage, mb, number in s.each(Op.BWD):
        if (stage, mb) in split:
            yield s.at(_RULE, number, f"the backward of s{stage} m{mb} is also there in its two halves")
    for stage, _, number in s.each(Op.RECOMPUTE, *BACKWARD_OPS):
        if stage < header.frozen:
            yield s.at(_RULE, number, f"stage {stage} is frozen: it has forwards only")
    for (stage, mb), numbers in s.places[Op.RECOMPUTE].items():
        for number in numbers[1:]:
            first = s.where(numbers[0])
            yield s.at(_RULE, number, f"s{stage} m{mb} is already replayed: {first}")
    for stage, _, number in s.each(Op.LOAD):
        if stage not in (0, header.last_stage):
            yield s.at(_RULE, number, f"only stages 0 and {header.last_stage} take data, not stage {stage}")
    yield from _steps(s)
    yield from _accumulated(s)


def _due(header: Header, stage: int, is_split: bool) -> list[Op]:
    """The operations of a micro-batch at a stage."""
    due = [Op.FWD]
    if stage in (0, header.last_stage):
        due.append(Op.LOAD)
    if stage == header.last_stage:
        due.append(Op.LOSS)
    if stage >= header.frozen and is_split:
        due += (Op.BWD_INPUT, Op.BWD_WEIGHT)
    elif stage >= header.frozen:
        due.append(Op.BWD)
    return due


def _not_one(s: Subject, op: Op, stage: int, mb: int, numbers: Sequence[int]) -> Findings:
    what = f"{op.value} s{stage} m{mb}"
    if op is Op.LOSS:
        what = f"{op.value} m{mb}"
    if not numbers:
        rank = s.header.rank_of(stage, mb)
        yield Finding(_RULE, rank, -1, f"{what} is missing")
        return
    first = s.where(numbers[0])
    times = f"{what} is there {len(numbers)} times; first: {first}"
    for number in numbers[1:]:
        yield s.at(_RULE, number, times)


def _steps(s: Subject) -> Findings:
    header = s.header
    steps = s.places[Op.STEP]
    for stage in range(header.num_stages):
        updates = range(header.num_updates(stage))
        for update, rank in product(updates, header.placement[stage]):
            everywhere = steps.get((stage, update), ())
            there = [number for number in everywhere if s.graph.ranks[number] == rank]
            if not there:
                yield Finding(_RULE, rank, -1, f"step s{stage} w{update} is missing")
            for number in there[1:]:
                first = s.where(there[0])
                yield s.at(_RULE, number, f"this update is already stepped: {first}")


def _accumulated(s: Subject) -> Findings:
    """Gradients of a stage accumulate for one update at a time, between the step before and the step that uses them."""
    steps: dict[StageAt, list[int]] = defaultdict(list)
    for number, i in enumerate(s.graph.instructions):
        rank = s.graph.ranks[number]
        done = steps[rank, i.stage]
        if i.op in STEP_OPS:
            done.append(number)
        elif i.op in WEIGHT_GRADIENT_OPS:
            update = s.header.update_of(i.stage, i.mb)
            if update < len(done):
                why = f"which is done: {s.where(done[update])}"
            elif update > len(done):
                why = f"but step s{i.stage} w{len(done)} has not used the gradients before"
            else:
                continue
            yield s.at(_RULE, number, f"its gradient belongs to update {update}, {why}")
