"""Rules `complete` and `ownership`: everything happens once, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.ir.op import OP_SPEC, STEP_OPS, WEIGHT_GRADIENT_OPS, Kind, Lane, Op
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
    yield from _forwards_and_backwards(s)
    yield from _data(s)
    yield from _steps(s)


def _forwards_and_backwards(s: Subject) -> Iterator[Finding]:
    header = s.header
    forward, replay = s.by_microbatch[Op.FWD], s.by_microbatch[Op.RECOMPUTE]
    whole, first, second = (s.by_microbatch[op] for op in (Op.BWD, Op.BWD_INPUT, Op.BWD_WEIGHT))
    for stage in range(header.num_stages):
        for mb in range(header.total_microbatches):
            key = stage, mb
            yield from _exactly_one(s, Op.FWD, key, forward.get(key, []))
            numbers = whole.get(key, [])
            if key in first or key in second:
                yield from _exactly_one(s, Op.BWD_INPUT, key, first.get(key, []))
                yield from _exactly_one(s, Op.BWD_WEIGHT, key, second.get(key, []))
                for number in numbers:
                    yield s.at("complete", number, f"the backward of s{stage} m{mb} is also there in its two halves")
            else:
                yield from _exactly_one(s, Op.BWD, key, numbers)
    for (stage, mb), numbers in replay.items():
        for number in numbers[1:]:
            yield s.at("complete", number, f"s{stage} m{mb} is already replayed: {s.where(numbers[0])}")


def _data(s: Subject) -> Iterator[Finding]:
    header = s.header
    loads, losses = s.by_microbatch[Op.LOAD], s.by_microbatch[Op.LOSS]
    ends = {0, header.last_stage}
    for mb in range(header.total_microbatches):
        for stage in ends:
            yield from _exactly_one(s, Op.LOAD, (stage, mb), loads.get((stage, mb), []))
        yield from _exactly_one(s, Op.LOSS, (header.last_stage, mb), losses.get((header.last_stage, mb), []))
    for stage, _, number in s.each(Op.LOAD):
        if stage not in ends:
            yield s.at("complete", number, f"only stages 0 and {header.last_stage} take data, not stage {stage}")


def _exactly_one(s: Subject, op: Op, key: tuple[int, int], numbers: list[int]) -> Iterator[Finding]:
    if len(numbers) == 1:
        return
    stage, mb = key
    what = f"{op.value} m{mb}" if op is Op.LOSS else f"{op.value} s{stage} m{mb}"
    if not numbers:
        yield Finding("complete", s.header.rank_of(stage, mb), -1, f"{what} is missing")
    for number in numbers[1:]:
        yield s.at("complete", number, f"{what} is there {len(numbers)} times; first: {s.where(numbers[0])}")


def _steps(s: Subject) -> Iterator[Finding]:
    header, ranks = s.header, s.graph.ranks
    steps = s.by_version[Op.STEP]
    for stage in range(header.num_stages):
        for update in range(header.num_updates(stage)):
            for rank in header.placement[stage]:
                there = [number for number in steps.get((stage, update), ()) if ranks[number] == rank]
                if not there:
                    yield Finding("complete", rank, -1, f"step s{stage} w{update} is missing")
                for number in there[1:]:
                    yield s.at("complete", number, f"this update is already stepped: {s.where(there[0])}")
    yield from _accumulated(s)


def _accumulated(s: Subject) -> Iterator[Finding]:
    """Gradients of a stage accumulate for one update at a time, between the step before and the step that uses them."""
    header, graph = s.header, s.graph
    for rank, instructions in enumerate(s.program.ranks):
        steps: dict[int, list[int]] = {}
        for number, i in enumerate(instructions, graph.starts[rank]):
            if i.op in STEP_OPS:
                steps.setdefault(i.stage, []).append(number)
            elif i.op in WEIGHT_GRADIENT_OPS:
                update = header.update_of(i.stage, i.mb)
                done = steps.get(i.stage, [])
                if update < len(done):
                    late = s.where(done[update])
                    yield s.at("complete", number, f"its gradient belongs to update {update}, which is done: {late}")
                elif update > len(done):
                    why = f"step s{i.stage} w{len(done)} has not used the gradients before"
                    yield s.at("complete", number, f"its gradient belongs to update {update}, but {why}")
