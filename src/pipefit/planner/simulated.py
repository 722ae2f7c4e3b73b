"""Simulated time of a candidate: its real program on the simulator.

Small programs are simulated whole, copies of the pipeline and all. Large ones are simulated as one pipeline with p and
with 2p micro-batches per update (3p where ranks hold several stages): beyond that every further micro-batch costs the
same, so the time grows on the line through the two; the reduction over copies is then added to each stage's optimizer
step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pipefit.cost import CostModel
from pipefit.errors import ScheduleError
from pipefit.planner.candidate import Estimate, costs_of, plan_of, program_for
from pipefit.planner.closed_forms import reduce_s
from pipefit.planner.devices import placement_for
from pipefit.planner.holdings import filling, small_program
from pipefit.planner.space import Config, Problem
from pipefit.planner.spilled_candidates import peaks_of
from pipefit.schedules import find, program_of
from pipefit.simulate import simulate
from pipefit.spec import Partition, Plan

# Forwards of a program that is still simulated whole, with all its copies.
_WHOLE = 1500


@dataclass(frozen=True)
class Simulated:
    """Times by the simulator.

    Attributes:
        step_s: seconds of one update in isolation.
        period_s: seconds from update to update.
        whole: the very program was simulated; else the time was extrapolated.
        peak_bytes: of each rank, under a cap.
        num_instructions: of the program, under a cap.
    """

    step_s: float
    period_s: float
    whole: bool
    peak_bytes: tuple[float, ...] = ()
    num_instructions: int = 0


def size_of(config: Config) -> int:
    """Forwards that are simulated for a candidate."""
    whole = config.num_microbatches * config.num_stages
    steps = 2 if find(config.schedule).is_synchronous else 4
    if whole * steps <= 2 * _WHOLE:
        return whole * steps
    first, second = _counts(config)
    return (first + second) * config.num_stages * (1 if find(config.schedule).is_synchronous else 3)


def simulated(problem: Problem, estimated: Estimate) -> Simulated | None:
    """Simulates a candidate; None when its schedule has no meaning for the shape after all, or it exceeds the cap."""
    config = estimated.config
    assert estimated.partition is not None
    timing, _ = costs_of(problem, config, estimated.partition)
    if problem.cap is not None:
        return _under_cap(problem, plan_of(problem, config, estimated.partition, keeps=estimated.keeps), timing)
    synchronous = find(config.schedule).is_synchronous
    whole = config.num_microbatches * config.num_stages * (2 if synchronous else 4) <= 2 * _WHOLE
    try:
        if whole or config.replicas:
            # The costs already have the messages split and the gathers added.
            plain = msgspec.structs.replace(plan_of(problem, config, estimated.partition), scatter_gather=False)
            return _whole(plain, timing, synchronous)
        return _extrapolated(config, estimated.partition, timing, synchronous)
    except ScheduleError:
        return None


def _under_cap(problem: Problem, plan: Plan, cost: CostModel) -> Simulated | None:
    assert problem.cap is not None
    program = program_for(problem, plan)
    once = simulate(program, cost, memory=problem.cap.num_ranks > 1)
    peaks, step_s = peaks_of(program, cost, once), once.makespan_s
    num_instructions = sum(map(len, program.ranks))
    if plan.spill is None:
        return Simulated(step_s, step_s, True, peaks, num_instructions)
    if max(peaks) > problem.cap.device_bytes:
        return None
    # Copies of one pass overlap with the next.
    thrice = simulate(program, cost, repeats=3, memory=False)
    return Simulated(step_s, (thrice.makespan_s - step_s) / 2, True, peaks, num_instructions)


def _whole(plan: Plan, timing: CostModel, synchronous: bool) -> Simulated:
    if synchronous:
        # Ranks issue in order, so the first of two passes takes what it would take in isolation.
        twice = simulate(program_of(plan), timing, repeats=2, memory=False, contention=_crowded(timing))
        first, second = twice.step_ends_s
        return Simulated(float(first - twice.start_s), float(second - first), True)
    steps = max(4, -(-2 * len(plan.placement.ranks) // plan.num_microbatches))
    steady = simulate(program_of(plan, num_steps=steps), timing, memory=False, contention=_crowded(timing))
    period = float(steady.period_s)
    return Simulated(float(steady.makespan_s) / steps, period, True)


def _crowded(cost: CostModel) -> bool:
    """Whether a message may be under way on a link when the next one is sent: then they must take turns there.

    Between two messages on a link a rank works on a stage at least once. Where that takes longer than any message,
    taking turns would change nothing, and the simulator is faster without.
    """
    work_s = min(min(cost.forward_s), min(map(sum, zip(cost.backward_input_s, cost.backward_weight_s, strict=True))))
    ranks = cost.topology.num_devices if cost.topology else 1
    bandwidth, latency = cost.link(0, ranks - 1)
    return latency + max((*cost.act_bytes[:-1], *cost.grad_bytes[:-1], 0.0)) / bandwidth > work_s


def _counts(config: Config) -> tuple[int, int]:
    """Micro-batches of the two programs from which the time is extrapolated."""
    least = filling(config.schedule, config.depth, config.chunks)
    return min(least, config.per_pipeline), min(least + config.depth, config.per_pipeline)


def _extrapolated(config: Config, partition: Partition, timing: CostModel, synchronous: bool) -> Simulated:
    placement = placement_for(config).ranks
    tails = [reduce_s(timing, stage, ranks) for stage, ranks in enumerate(placement)]
    one_copy = replace(timing, step_s=tuple(a + b for a, b in zip(timing.step_s, tails, strict=True)))
    if one_copy.speed:
        # One pipeline stands for all copies, so it runs at the pace of the slowest.
        pace = [min(timing.speed[r + config.depth * k] for k in range(config.data)) for r in range(config.depth)]
        one_copy = replace(one_copy, speed=tuple(pace))
    recompute = tuple(index for index, stage in enumerate(partition.stages) if stage.recompute)
    times = []
    counts = _counts(config)
    for count in dict.fromkeys(counts):
        program = small_program(config.schedule, config.depth, count, config.chunks, recompute)
        timeline = simulate(program, one_copy, memory=False, contention=_crowded(one_copy))
        times.append(float(timeline.makespan_s if synchronous else timeline.period_s))
    if len(times) == 1:
        return Simulated(times[0], times[0], counts[0] == config.per_pipeline and config.data == 1)
    further = (times[1] - times[0]) / (counts[1] - counts[0])
    step = times[1] + (config.per_pipeline - counts[1]) * further
    return Simulated(step, step, False)
