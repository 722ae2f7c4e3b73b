"""Estimate of one candidate: its cut, the memory of its ranks, the seconds of its step."""

from __future__ import annotations

from pipefit.errors import ScheduleError
from pipefit.ir.op import Kind
from pipefit.planner.candidate import Estimate, costs_of
from pipefit.planner.closed_forms import estimate_s
from pipefit.planner.cuts import Within, cut
from pipefit.planner.holdings import holdings_of, least_holdings, peaks
from pipefit.planner.space import Config, Problem, positions
from pipefit.planner.spilled_candidates import estimate_spilled
from pipefit.schedules.registry import NO_HALVES
from pipefit.spec import Partition
from pipefit.units import format_bytes


def estimate(problem: Problem, config: Config) -> Estimate:
    """Cuts the model for a candidate and counts time and memory."""
    if config.spill is not None:
        return estimate_spilled(problem, config)
    try:
        return problem.once(("estimate", config), lambda: _estimate(problem, config))
    except ScheduleError as refusal:
        return Estimate(config, None, why=str(refusal))


def may_fit(problem: Problem, config: Config) -> bool:
    """Returns False where what the ranks of a looped schedule hold at least does not fit: known without its program."""
    if config.schedule not in ("interleaved", "breadth-first"):
        return True
    partition = cut(problem, config, set(range(config.num_stages)) if config.recompute == "stage" else set())
    assert partition is not None
    needed = peaks(least_holdings(config), costs_of(problem, config, partition)[1], _stages_of(config))
    fits = all(need <= limit for need, limit in zip(needed, problem.memory_of(config), strict=True))
    return fits or problem.profile.num_frozen(partition) > 0


def _stages_of(config: Config) -> list[tuple[int, ...]]:
    owner = positions(config)
    return [tuple(stage for stage, rank in enumerate(owner) if rank == own) for own in range(config.depth)]


def _estimate(problem: Problem, config: Config) -> Estimate:
    """The first cut that fits; where none does, the last one that was made for time only."""
    limits = problem.memory_of(config)
    every = set(range(config.num_stages))
    recomputed = every if config.recompute == "stage" else set()
    if config.inside == "layer" and any(kind == Kind.HALF for held in holdings_of(config, ()) for kind, _ in held.keys):
        return Estimate(config, None, why=f"recompute layer: {NO_HALVES}")

    def measured(recomputed: set[int]) -> Estimate:
        partition = cut(problem, config, recomputed)
        assert partition is not None
        return _measure(problem, config, partition, recomputed, limits)

    found = measured(recomputed)
    if config.recompute == "some":
        # Replays on the ranks that lack memory make these slower, so they get fewer layers, and the loop tries again.
        for _ in range(3):
            short = {r for r, (need, limit) in enumerate(zip(found.peak_bytes, limits, strict=True)) if need > limit}
            if short <= recomputed:
                break
            recomputed = recomputed | short
            found = measured(recomputed)
    if not found.fits and config.chunks == 1 and config.partitioner in ("minmax", "links") and not config.layers:
        for again in (recomputed, every) if config.recompute == "some" and recomputed != every else (recomputed,):
            tight = cut(problem, config, again, Within(holdings_of(config, again), limits))
            if tight is not None:
                return _measure(problem, config, tight, again, limits)
    return found


def _measure(
    problem: Problem,
    config: Config,
    partition: Partition,
    recomputed: set[int],
    limits: list[float],
) -> Estimate:
    timing, sizes = costs_of(problem, config, partition)
    held = holdings_of(config, recomputed, problem.profile.num_frozen(partition))
    needed = peaks(held, sizes, _stages_of(config))
    worst = max(range(len(needed)), key=lambda rank: needed[rank] / limits[rank])
    overflow = needed[worst] / limits[worst]
    where = f"stage {worst}" if config.chunks == 1 else f"rank {worst}"
    why = f"{where} needs {format_bytes(needed[worst])} of {format_bytes(limits[worst])}" if overflow > 1 else ""
    step_s = estimate_s(problem, config, partition, timing)
    return Estimate(config, partition, needed, overflow, step_s, step_s, why)
