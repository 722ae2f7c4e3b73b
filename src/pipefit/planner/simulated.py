"""Simulated time of a candidate: its real program on the simulator.

Small programs are simulated whole, with all copies of the pipeline. Large ones are simulated as one pipeline with p and
2p micro-batches per update (2p and 3p where ranks hold several stages). Beyond that every further micro-batch takes the
same time, so the time is extrapolated on the line through the two; the reduction over copies is then added to each
stage's optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import add

import msgspec

from pipefit.cost import CostModel
from pipefit.errors import ScheduleError
from pipefit.ir import Program
from pipefit.ir.instruction import Indices
from pipefit.planner.bounds import crowded, reduction_of
from pipefit.planner.candidate import Estimate, costs_of, plan_of, program_for
from pipefit.planner.holdings import Small, filling, small_program
from pipefit.planner.space import Config, Problem, least_of_copies, placement_for
from pipefit.planner.spilled_candidates import peaks_of
from pipefit.schedules import Schedule, Shape, find, shape_of
from pipefit.simulate import simulate
from pipefit.spec import Plan
from pipefit.spec.plan import Shard

# Forwards of a program that is still simulated whole, with all its copies.
_WHOLE = 1500


def simulated(problem: Problem, estimated: Estimate) -> Estimate | None:
    """Simulates a candidate; None when its schedule does not support the shape, or it exceeds the cap."""
    config = estimated.config
    partition = estimated.partition
    assert partition is not None
    timing, _ = costs_of(problem, config, partition)
    plan = plan_of(problem, config, partition)
    if problem.cap is not None:
        return _under_cap(problem, estimated, plan, timing)
    try:
        if _is_whole(config):
            # The costs already include the split of messages and the gathers.
            step_s, period_s = update_s(msgspec.structs.replace(plan, scatter_gather=False), timing)
        else:
            step_s = period_s = max(_extrapolated(config, plan, timing), estimated.period_s)
    except ScheduleError:
        return None
    # Few updates, or an extrapolation, may not show yet what binds when many follow each other.
    period_s = max(period_s, estimated.period_s)
    return replace(estimated, step_s=step_s, period_s=period_s, size=size_of(config))


def _updates(config: Config) -> int:
    if find(config.schedule).is_synchronous:
        return 2
    return 4


def _is_whole(config: Config) -> bool:
    """Returns whether a candidate is simulated whole: it is small, or its copies differ."""
    return _whole_size(config) <= 2 * _WHOLE or bool(config.replicas or config.shares)


def _whole_size(config: Config) -> int:
    return config.num_microbatches * config.num_stages * _updates(config)


def size_of(config: Config) -> int:
    """Returns the number of forwards that are simulated for a candidate."""
    if _is_whole(config):
        return _whole_size(config)
    return sum(_counts(config)) * config.num_stages * (_updates(config) - 1)


def _under_cap(problem: Problem, estimated: Estimate, plan: Plan, cost: CostModel) -> Estimate | None:
    cap = problem.capped
    config = estimated.config
    program = program_for(problem, plan)
    several = cap.num_ranks > 1
    once = simulate(program, cost, steps_only=not several)
    peaks = peaks_of(program, cost)
    step_s = once.makespan_s
    if several:
        # A sent value is held until its simulated arrival.
        arrived = map(once.peak_bytes, range(cap.num_ranks))
        peaks = list(map(max, peaks, arrived))
    found = replace(estimated, peak_bytes=tuple(peaks), step_s=step_s, period_s=step_s, size=_whole_size(config))
    if plan.spill is None:
        return found
    if max(peaks) > cap.device_bytes:
        return None
    # Copies of one pass overlap with the next.
    thrice = simulate(program, cost, repeats=3, steps_only=True)
    return replace(found, period_s=(thrice.makespan_s - step_s) / 2)


def update_s(plan: Plan, timing: CostModel) -> tuple[float, float]:
    """Seconds of one update in isolation, and from update to update."""
    schedule = find(plan.schedule)
    steps = 1
    repeats = 2
    if not schedule.is_synchronous:
        repeats = 1
        steps = max(4, -(-2 * len(plan.placement.ranks) // plan.num_microbatches))
    program = _program(schedule, msgspec.msgpack.encode(shape_of(plan, num_steps=steps)))
    # Ranks issue in order, so the first of two passes takes the same time as in isolation.
    seen = simulate(program, timing, repeats=repeats, steps_only=True, contention=crowded(timing))
    if repeats == 2:
        first, second = seen.step_ends_s
        return float(first - seen.start_s), float(second - first)
    return float(seen.makespan_s) / steps, float(seen.period_s)


@lru_cache(maxsize=128)
def _program(schedule: Schedule, shape: bytes) -> Program:
    """A program, kept with its graph: the next candidate may have the same shape."""
    return schedule(msgspec.msgpack.decode(shape, type=Shape))


def _counts(config: Config) -> tuple[int, int]:
    """Micro-batches of the two programs from which the time is extrapolated."""
    few = filling(config)
    many = few + config.depth
    if config.shares_gradients and config.per_pipeline * config.num_stages <= _WHOLE:
        # Gathers that few micro-batches wait for are hidden behind many.
        few = many = config.per_pipeline
    return min(few, config.per_pipeline), min(many, config.per_pipeline)


def _tails(cost: CostModel, placement: Sequence[Indices]) -> list[float]:
    """Seconds of each stage's reduction; with those that leave through the same port, where there are such."""
    alone = []
    ports = []
    busy_s: Counter[object] = Counter()
    for stage, ranks in enumerate(placement):
        reduction = reduction_of(stage)
        alone.append(cost.reduce_s(reduction, ranks))
        ports.append(cost.reduction_ports(reduction, ranks))
        busy_s.update(dict.fromkeys(ports[-1], alone[-1]))
    tails = []
    for used, own_s in zip(ports, alone, strict=True):
        shared = [busy_s[port] for port in used]
        tails.append(max(shared, default=own_s))
    return tails


def _extrapolated(config: Config, plan: Plan, timing: CostModel) -> float:
    ranks = placement_for(config).ranks
    shard: Shard = "none"
    if config.shares_gradients:
        # Two copies represent all: gathers and sums are a part of the program.
        shard = config.shard
        one_copy = replace(timing, copies=ranks)
    else:
        tails = _tails(timing, ranks)
        one_copy = replace(timing, step_s=tuple(map(add, timing.step_s, tails)))
    if one_copy.speed:
        # One pipeline represents all copies, so it runs at the speed of the slowest.
        pace = least_of_copies(config, timing.speed)
        one_copy = replace(one_copy, speed=(*pace, *pace))
    recompute = tuple(index for index, stage in enumerate(plan.partition.stages) if stage.is_replayed)
    schedule = find(config.schedule)
    small = Small(schedule, config.depth, 0, config.chunks, recompute, frozen=plan.frozen, shard=shard)

    def time_s(count: int) -> float:
        program = small_program(small._replace(microbatches=count))
        timeline = simulate(program, one_copy, steps_only=True, contention=crowded(one_copy))
        return float(timeline.makespan_s if schedule.is_synchronous else timeline.period_s)

    few, many = _counts(config)
    few_s = time_s(few)
    if few == many:
        return few_s
    many_s = time_s(many)
    each_s = (many_s - few_s) / (many - few)
    return many_s + (config.per_pipeline - many) * each_s
