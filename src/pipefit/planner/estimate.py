"""Estimate of one candidate: its cut, the memory of its ranks, the seconds of its step."""

from __future__ import annotations

import math
from operator import truediv

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Indices
from pipefit.ir.op import Kind
from pipefit.planner.bounds import least_s
from pipefit.planner.candidate import Estimate, costs_of
from pipefit.planner.cuts import busiest_s, cut, least_bytes
from pipefit.planner.holdings import Holding, ahead_of, first_holdings, holdings_of, peaks
from pipefit.planner.space import Config, Problem, positions
from pipefit.planner.spilled_candidates import estimate_spilled
from pipefit.schedules.registry import NO_HALVES
from pipefit.spec import Partition
from pipefit.units import format_bytes


def estimate(problem: Problem, config: Config) -> Estimate:
    """Cuts the model for a candidate, counts its memory, and bounds its time."""
    if config.spill is not None:
        return estimate_spilled(problem, config)
    try:
        return problem.once(("estimate", config), lambda: _estimate(problem, config))
    except ScheduleError as refusal:
        return Estimate(config, None, why=str(refusal))


def of_cut_s(problem: Problem, config: Config) -> float:
    """Seconds per update that a candidate takes at least, by the times of its stages."""
    if config.depth > 1:
        return busiest_s(problem, config, _recomputed(config))
    return 0.0


def bounded(problem: Problem, config: Config) -> Estimate:
    """The candidate with its cut and its bound; its memory is not counted yet, unless it may change the cut."""
    if _has_choice(config):
        return estimate(problem, config)
    partition = cut(problem, config, _recomputed(config))
    assert partition is not None
    return Estimate(config, partition, overflow=0.0, period_s=_least_s(problem, config, partition))


def need_bytes(problem: Problem, config: Config) -> float:
    """The least memory of each device in which a candidate fits; infinite where it is not possible at all."""
    try:
        if _is_refused(config):
            return math.inf
        recomputed = _recomputed(config)
        if config.recompute == "some":
            recomputed = set(range(config.depth))
        # The cuts by memory do not know the work of layers; the cut by time fits for certain.
        knows_work = problem.of(config).knows_work
        if _has_choice(config) and config.partitioner in ("minmax", "links") and not knows_work:
            return least_bytes(problem, config)
        partition = cut(problem, config, recomputed)
        assert partition is not None
        held = _held(problem, config, recomputed, problem.profile.num_frozen(partition))
        _, sizes = costs_of(problem, config, partition)
        return max(peaks(held, sizes, _stages_of(config)))
    except ScheduleError:
        return math.inf


def _held(problem: Problem, config: Config, recomputed: set[int], frozen: int = 0) -> tuple[Holding, ...]:
    """Live values of each rank, with the work of its instructions where the profile knows it."""
    return holdings_of(config, recomputed, frozen, works=problem.of(config).knows_work)


def _is_refused(config: Config) -> bool:
    """Returns whether layers would be replayed in each half of a backward."""
    if config.inside != "layer":
        return False
    kinds = set()
    for held in holdings_of(config, ()):
        kinds |= {kind for kind, _ in held.keys}
    return Kind.HALF in kinds


def _has_choice(config: Config) -> bool:
    """Returns whether there are several cuts of a candidate, or sets of stages that replay, to fit its memory."""
    free = config.chunks == 1 and config.partitioner in ("minmax", "links") and not config.layers
    return config.depth > 1 and (free or config.recompute == "some")


def _recomputed(config: Config) -> set[int]:
    if config.recompute == "stage":
        return set(range(config.num_stages))
    return set()


def _least_s(problem: Problem, config: Config, partition: Partition) -> float:
    timing, _ = costs_of(problem, config, partition)
    return problem.once(("least", config, partition), lambda: least_s(problem, config, partition, timing))


def _stages_of(config: Config) -> list[Indices]:
    found: list[Indices] = [()] * config.depth
    for stage, rank in enumerate(positions(config)):
        found[rank] += (stage,)
    return found


def _estimate(problem: Problem, config: Config) -> Estimate:
    """The first cut that fits; where none does, the last one that was made for time only."""
    limits = problem.memory_of(config)
    every = set(range(config.num_stages))
    recomputed = _recomputed(config)
    if _is_refused(config):
        return Estimate(config, None, why=f"recompute layer: {NO_HALVES}")

    def measured(recomputed: set[int]) -> Estimate:
        partition = cut(problem, config, recomputed)
        assert partition is not None
        return _measure(problem, config, partition, recomputed, limits)

    found = measured(recomputed)
    if config.recompute == "some":
        # Replays on the ranks that lack memory make these slower, so they get fewer layers, and the loop tries again.
        for _ in range(3):
            needs = enumerate(found.peak_bytes)
            short = {rank for rank, need in needs if need > limits[rank]}
            if short <= recomputed:
                break
            recomputed = recomputed | short
            found = measured(recomputed)
    if not found.fits and _has_choice(config):
        choices = [recomputed]
        if config.recompute == "some" and recomputed != every:
            choices.append(every)
        for again in choices:
            tight = cut(problem, config, again, limits)
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
    _, sizes = costs_of(problem, config, partition)
    frozen = problem.profile.num_frozen(partition)
    shares = [0.0]
    where = "stage"
    least = ""
    if config.chunks > 1:
        where = "rank"
    if config.chunks > 1 and not frozen and ahead_of(config):
        # Enough to see that a candidate does not fit, without its program.
        needed = peaks(first_holdings(config), sizes, _stages_of(config))
        shares = list(map(truediv, needed, limits))
        least = "at least "
    if max(shares) <= 1:
        needed = peaks(_held(problem, config, recomputed, frozen), sizes, _stages_of(config))
        shares = list(map(truediv, needed, limits))
        least = ""
    overflow = max(shares)
    why = ""
    if overflow > 1:
        worst = shares.index(overflow)
        why = f"{where} {worst} needs {least}{format_bytes(needed[worst])} of {format_bytes(limits[worst])}"
    step_s = _least_s(problem, config, partition)
    return Estimate(config, partition, needed, overflow, step_s, step_s, why)
