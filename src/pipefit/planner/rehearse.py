"""The last word: a candidate's real program on the simulator.

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
from pipefit.planner.closed_forms import reduce_s
from pipefit.planner.held import filling, small_program
from pipefit.planner.judge import Judged, costs_of, plan_of
from pipefit.planner.ranks import placement_for
from pipefit.planner.space import Config, Ground
from pipefit.schedules import find, program_of
from pipefit.simulate import simulate
from pipefit.spec import Partition, Plan

__all__ = ["Rehearsal", "rehearse", "size_of"]

# Forwards of a program that is still simulated whole, with all its copies.
_WHOLE = 1500


@dataclass(frozen=True)
class Rehearsal:
    """What the simulator says.

    Attributes:
        step_s: seconds of one update by itself.
        period_s: seconds from update to update.
        whole: the very program was simulated; else the time was extrapolated.
    """

    step_s: float
    period_s: float
    whole: bool


def size_of(config: Config) -> int:
    """Forwards that a rehearsal simulates."""
    whole = config.num_microbatches * config.num_stages
    steps = 2 if find(config.schedule).is_synchronous else 4
    if whole * steps <= 2 * _WHOLE:
        return whole * steps
    first, second = _counts(config)
    return (first + second) * config.num_stages * (1 if find(config.schedule).is_synchronous else 3)


def rehearse(ground: Ground, judged: Judged) -> Rehearsal | None:
    """Simulates a candidate; None when its schedule has no meaning for the shape after all."""
    config = judged.config
    assert judged.partition is not None
    timing, _ = costs_of(ground, config, judged.partition)
    synchronous = find(config.schedule).is_synchronous
    whole = config.num_microbatches * config.num_stages * (2 if synchronous else 4) <= 2 * _WHOLE
    try:
        if whole or config.replicas:
            # The costs already have the messages divided and the gathers added.
            plain = msgspec.structs.replace(plan_of(ground, config, judged.partition), scatter_gather=False)
            return _whole(plain, timing, synchronous)
        return _extrapolated(config, judged.partition, timing, synchronous)
    except ScheduleError:
        return None


def _whole(plan: Plan, timing: CostModel, synchronous: bool) -> Rehearsal:
    if synchronous:
        # Ranks issue in order, so the first of two passes takes what it would take alone.
        twice = simulate(program_of(plan), timing, repeats=2, memory=False, contention=_crowded(timing))
        first, second = twice.step_ends_s
        return Rehearsal(float(first - twice.start_s), float(second - first), True)
    steps = max(4, -(-2 * len(plan.placement.ranks) // plan.num_microbatches))
    steady = simulate(program_of(plan, num_steps=steps), timing, memory=False, contention=_crowded(timing))
    period = float(steady.period_s)
    return Rehearsal(float(steady.makespan_s) / steps, period, True)


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


def _extrapolated(config: Config, partition: Partition, timing: CostModel, synchronous: bool) -> Rehearsal:
    placement = placement_for(config).ranks
    tails = [reduce_s(timing, stage, ranks) for stage, ranks in enumerate(placement)]
    alone = replace(timing, step_s=tuple(a + b for a, b in zip(timing.step_s, tails, strict=True)))
    if alone.speed:
        # One pipeline stands for all copies, so it runs at the pace of the slowest.
        pace = [min(timing.speed[r + config.depth * k] for k in range(config.data)) for r in range(config.depth)]
        alone = replace(alone, speed=tuple(pace))
    recompute = tuple(index for index, stage in enumerate(partition.stages) if stage.recompute)
    times = []
    counts = _counts(config)
    for count in dict.fromkeys(counts):
        program = small_program(config.schedule, config.depth, count, config.chunks, recompute)
        timeline = simulate(program, alone, memory=False, contention=_crowded(alone))
        times.append(float(timeline.makespan_s if synchronous else timeline.period_s))
    if len(times) == 1:
        return Rehearsal(times[0], times[0], counts[0] == config.per_pipeline and config.data == 1)
    further = (times[1] - times[0]) / (counts[1] - counts[0])
    step = times[1] + (config.per_pipeline - counts[1]) * further
    return Rehearsal(step, step, False)
