"""Rule `memory`: the bytes that a rank holds at once, compared with its capacity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from pipefit.errors import PipefitError
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, lies_in_slot, lifetimes, tier_peak_bytes
from pipefit.ir.values import Value
from pipefit.units import format_bytes
from pipefit.verify.subject import Finding, Subject


def capacities(capacity_bytes: float | Sequence[float], num_ranks: int) -> list[float]:
    """A capacity for each rank.

    Raises:
        PipefitError: a wrong number of capacities, or a negative one.
    """
    given = [capacity_bytes] * num_ranks if isinstance(capacity_bytes, int | float) else list(capacity_bytes)
    if len(given) != num_ranks:
        raise PipefitError(
            f"capacity_bytes: expected one number or one for each of {num_ranks} ranks, got {len(given)}"
        )
    if any(not capacity >= 0 for capacity in given):
        raise PipefitError(f"capacity_bytes: expected numbers of at least 0, got {given}")
    return given


def memory(s: Subject, given: Sequence[float], size: Callable[[Value], float]) -> Iterator[Finding]:
    """The highest sum of sizes on each rank is at most its capacity."""
    for rank, capacity in enumerate(given):
        highest, index = device_peak_bytes(s.program, rank, size)
        if highest <= capacity:
            continue
        lives = [life for life in lifetimes(s.program, rank) if not lies_in_slot(s.header, life.value)]
        sizes: dict[str, list[float]] = defaultdict(list)
        for life in lives:
            if life.born <= index <= life.dies and size(life.value):
                sizes[life.value.kind].append(size(life.value))
        kinds = sorted(sizes, key=lambda kind: sum(sizes[kind]))[::-1]
        parts = [f"{len(sizes[kind])} {kind} {format_bytes(sum(sizes[kind]))}" for kind in kinds]
        slots = arena_bytes(s.header, rank, size)
        held = ", ".join(parts + [f"slots {format_bytes(slots)}"] * (slots > 0))
        over = format_bytes(highest - capacity)
        message = f"holds {format_bytes(highest)}, capacity {format_bytes(capacity)}, {over} too much: {held}"
        if s.program.ranks[rank]:
            number = s.graph.starts[rank] + min(max(index, 0), len(s.program.ranks[rank]) - 1)
            yield s.at("memory", number, message)
        else:
            yield Finding("memory", rank, -1, message)


def tiers(s: Subject, limit_bytes: float, size: Callable[[Value], float]) -> Iterator[Finding]:
    """The bytes of all ranks on the tier at their peak, one copy of each value, are at most its capacity."""
    spill = s.header.spill
    if spill is None:
        return
    peaks = [tier_peak_bytes(s.program, rank, size) for rank in range(s.header.num_ranks)]
    total = sum(highest for highest, _ in peaks)
    if total > limit_bytes:
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank][0])
        message = (
            f"the {spill.tier} holds {format_bytes(total)} for all ranks, capacity {format_bytes(limit_bytes)}, "
            f"{format_bytes(total - limit_bytes)} too much"
        )
        yield Finding("memory", rank, -1, message)
