"""Rules `complete` and `ownership`: everything happens once, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.ir.op import Op
from pipefit.verify.subject import Finding, Subject

__all__ = ["complete", "ownership"]

_OWNED = (Op.LOAD, Op.FWD, Op.LOSS, Op.RECOMPUTE, Op.BWD, Op.BWD_INPUT, Op.BWD_WEIGHT)
_HELD = (Op.STEP, Op.DROP, Op.FETCH, Op.EVICT)


def ownership(s: Subject) -> Iterator[Finding]:
    """Instructions of a micro-batch on the rank of the round-robin rule, those of weights on a rank of the stage."""
    placement, ranks = s.header.placement, s.graph.ranks
    for op in _OWNED:
        for (stage, mb), numbers in s.by_microbatch[op].items():
            owner = placement[stage][mb % len(placement[stage])]
            for number in numbers:
                if ranks[number] != owner:
                    yield s.at("ownership", number, f"stage {stage} runs micro-batch {mb} on rank {owner}")
    for op in _HELD:
        for (stage, _), numbers in s.by_version[op].items():
            for number in numbers:
                if ranks[number] not in placement[stage]:
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
    for (stage, _), numbers in loads.items():
        for number in numbers if stage not in ends else ():
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
                own = [number for number in steps.get((stage, update), ()) if ranks[number] == rank]
                if not own:
                    yield Finding("complete", rank, -1, f"step s{stage} w{update} is missing")
                for number in own[1:]:
                    yield s.at("complete", number, f"this update is already stepped: {s.where(own[0])}")
    for number, step in _late_gradients(s):
        yield s.at("complete", number, f"adds to gradients that are already stepped: {s.where(step)}")


def _late_gradients(s: Subject) -> Iterator[tuple[int, int]]:
    """Backwards after the step of their own update, and that step."""
    header, ranks = s.header, s.graph.ranks
    stepped: dict[tuple[int, int, int], int] = {}
    for (stage, update), numbers in s.by_version[Op.STEP].items():
        for number in numbers:
            stepped.setdefault((ranks[number], stage, update), number)
    for op in (Op.BWD, Op.BWD_WEIGHT):
        for (stage, mb), numbers in s.by_microbatch[op].items():
            update = header.update_of(stage, mb)
            for number in numbers:
                step = stepped.get((ranks[number], stage, update))
                if step is not None and number > step:
                    yield number, step
