"""Rule `memory`: the bytes that a rank holds at once, compared with its capacity."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pipefit.errors import PipefitError
from pipefit.ir.liveness import Size, arena_bytes, device_peak_bytes, lies_in_slot, lifetimes, tier_peak_bytes
from pipefit.spec.plan import Figures
from pipefit.units import format_bytes
from pipefit.verify.subject import Finding, Findings, Subject


def for_each_rank(name: str, given: float | Sequence[float], num_ranks: int, least: float) -> Figures:
    """A figure for each rank, from one for all or from as many.

    Raises:
        PipefitError: a wrong number of figures, or one that is too small.
    """
    if isinstance(given, int | float):
        figures = (float(given),) * num_ranks
    else:
        figures = tuple(given)
    if len(figures) != num_ranks:
        raise PipefitError(f"{name}: expected one figure or one for each of {num_ranks} ranks, got {len(figures)}")
    if not all(figure >= least for figure in figures):
        raise PipefitError(f"{name}: expected one figure of at least {least}, or one for each rank, got {given}")
    return figures


def memory(s: Subject, given: Sequence[float], size: Size) -> Findings:
    """The highest sum of sizes on each rank is at most its capacity."""
    for rank, capacity in enumerate(given):
        highest, index = device_peak_bytes(s.program, rank, size)
        if highest <= capacity:
            continue
        held = _held(s, rank, index, size)
        over = format_bytes(highest - capacity)
        own = f"holds {format_bytes(highest)}, capacity {format_bytes(capacity)}"
        message = f"{own}, {over} too much: {held}"
        last = len(s.program.ranks[rank]) - 1
        if last < 0:
            yield Finding("memory", rank, -1, message)
        else:
            place = min(max(index, 0), last)
            number = s.graph.starts[rank] + place
            yield s.at("memory", number, message)


def _held(s: Subject, rank: int, index: int, size: Size) -> str:
    """The number and the bytes of the values of each kind that a rank holds at an instruction, the most first."""
    totals: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for life in lifetimes(s.program, rank):
        if lies_in_slot(s.header, life.value):
            continue
        nbytes = size(life.value)
        if nbytes and life.born <= index <= life.dies:
            totals[life.value.kind] += nbytes
            times[life.value.kind] += 1
    parts = []
    for kind in reversed(sorted(totals, key=totals.__getitem__)):
        size_of_kind = format_bytes(totals[kind])
        parts.append(f"{times[kind]} {kind} {size_of_kind}")
    slots = arena_bytes(s.header, rank, size)
    if slots:
        parts.append(f"slots {format_bytes(slots)}")
    return ", ".join(parts)


def tiers(s: Subject, limit_bytes: float, size: Size) -> Findings:
    """The bytes of all ranks on the tier at their peak, one copy of each value, are at most its capacity."""
    spill = s.header.spill
    if spill is None:
        return
    peaks = []
    for rank in range(s.header.num_ranks):
        highest, _ = tier_peak_bytes(s.program, rank, size)
        peaks.append(highest)
    total = sum(peaks)
    if total > limit_bytes:
        fullest = peaks.index(max(peaks))
        over = format_bytes(total - limit_bytes)
        held = f"the {spill.tier} holds {format_bytes(total)} for all ranks"
        message = f"{held}, capacity {format_bytes(limit_bytes)}, {over} too much"
        yield Finding("memory", fullest, -1, message)
