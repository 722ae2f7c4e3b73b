"""Rules `complete` and `ownership`: every instruction is there once, and on its rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from pipefit.ir.op import BACKWARD_OPS, OP_SPEC, STEP_OPS, WEIGHT_GRADIENT_OPS, Kind, Lane, Op
from pipefit.verify.subject import Finding, Subject

_OWNED = [op for op, spec in OP_SPEC.items() if "mb" in spec.fields and spec.lane is Lane.COMPUTE]
_TRAVELS = Kind.ACT.value
_HELD = (Op.STEP, Op.DROP, Op.FETCH, Op.EVICT)


def ownership(s: Subject) -> Iterator[Finding]:
    """Instructions of a micro-batch on the rank of the round-robin rule, those of weights on a rank of the stage."""
    placement, ranks = s.header.placement, s.graph.ranks
    for stage, mb, number in s.each(*_OWNED):
        owner = placement[stage][mb % len(placement[stage])]
        if ranks[number] != owner:
            yield s.at("ownership", number, f"stage {stage} runs micro-batch {mb} on rank {owner}")
    for stage, _, number in s.each(*_HELD):
        # An activation is on the rank that made it, or on one that it was sent to.
        sent = s.graph.instructions[number].kind == _TRAVELS and stage < s.header.last_stage
        if ranks[number] not in placement[stage] + (placement[stage + 1] if sent else ()):
            holders = ", ".join(map(str, placement[stage]))
            yield s.at("ownership", number, f"the weights of stage {stage} are on rank {holders}")


def complete(s: Subject) -> Iterator[Finding]:
    """One of each for every stage, micro-batch and update."""
    header, split = s.header, s.places[Op.BWD_INPUT].keys() | s.places[Op.BWD_WEIGHT].keys()
    ends = {0, header.last_stage}
    for stage, mb in product(range(header.num_stages), range(header.total_microbatches)):
        backward = [Op.BWD_INPUT, Op.BWD_WEIGHT] if (stage, mb) in split else [Op.BWD]
        due = [Op.FWD] if stage < header.frozen else [Op.FWD, *backward]
        due += [Op.LOAD] if stage in ends else []
        due += [Op.LOSS] if stage == header.last_stage else []
        for op in due:
            if len(numbers := s.places[op].get((stage, mb), ())) != 1:
                yield from _not_one(s, op, stage, mb, numbers)
    for stage, mb, number in s.each(Op.BWD):
        if (stage, mb) in split:
            yield s.at("complete", number, f"the backward of s{stage} m{mb} is also there in its two halves")
    for stage, _, number in s.each(Op.RECOMPUTE, *BACKWARD_OPS):
        if stage < header.frozen:
            yield s.at("complete", number, f"stage {stage} is frozen: it has forwards only")
    for (stage, mb), numbers in s.places[Op.RECOMPUTE].items():
        for number in numbers[1:]:
            yield s.at("complete", number, f"s{stage} m{mb} is already replayed: {s.where(numbers[0])}")
    for stage, _, number in s.each(Op.LOAD):
        if stage not in ends:
            yield s.at("complete", number, f"only stages 0 and {header.last_stage} take data, not stage {stage}")
    yield from _steps(s)
    yield from _accumulated(s)


def _not_one(s: Subject, op: Op, stage: int, mb: int, numbers: Sequence[int]) -> Iterator[Finding]:
    what = f"{op.value} m{mb}" if op is Op.LOSS else f"{op.value} s{stage} m{mb}"
    if not numbers:
        yield Finding("complete", s.header.rank_of(stage, mb), -1, f"{what} is missing")
    for number in numbers[1:]:
        yield s.at("complete", number, f"{what} is there {len(numbers)} times; first: {s.where(numbers[0])}")


def _steps(s: Subject) -> Iterator[Finding]:
    header, ranks = s.header, s.graph.ranks
    for stage in range(header.num_stages):
        for update, rank in product(range(header.num_updates(stage)), header.placement[stage]):
            there = [number for number in s.places[Op.STEP].get((stage, update), ()) if ranks[number] == rank]
            if not there:
                yield Finding("complete", rank, -1, f"step s{stage} w{update} is missing")
            for number in there[1:]:
                yield s.at("complete", number, f"this update is already stepped: {s.where(there[0])}")


def _accumulated(s: Subject) -> Iterator[Finding]:
    """Gradients of a stage accumulate for one update at a time, between the step before and the step that uses them."""
    steps: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (i, rank) in enumerate(zip(s.graph.instructions, s.graph.ranks, strict=True)):
        if i.op in STEP_OPS:
            steps[rank, i.stage].append(number)
        elif i.op in WEIGHT_GRADIENT_OPS:
            done, update = steps[rank, i.stage], s.header.update_of(i.stage, i.mb)
            if update == len(done):
                continue
            why = f"step s{i.stage} w{len(done)} has not used the gradients before"
            late = f"which is done: {s.where(done[update])}" if update < len(done) else f"but {why}"
            yield s.at("complete", number, f"its gradient belongs to update {update}, {late}")
