"""The figures by which schedules are compared: the object that `pipefit draw --json` prints."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from pipefit.cost import CostModel, unit
from pipefit.ir.collector import collector_paused
from pipefit.ir.liveness import kept_inputs, peak_inflight, weight_versions
from pipefit.ir.op import Op
from pipefit.ir.program import Program, WeightRule
from pipefit.simulate.simulate import simulate
from pipefit.spec.files import JsonObject
from pipefit.timeline import Timeline

# Updates from which the period of a program with several follows, or of one that spills.
_ROUNDS = 4


def metrics(
    program: Program, timeline: Timeline, cost: CostModel | None = None, *, steady: Program | None = None
) -> JsonObject:
    """Figures of a program and its timeline, in the unit of the costs.

    Args:
        program: the timeline's program.
        timeline: the program's times.
        cost: the costs of the simulation; None: unit costs without latency.
        steady: the same schedule with more steps, for the period of an asynchronous one; see `steady_period_s`.
    """
    header = program.header
    ranks = range(len(program.ranks))
    cost = cost or unit(header)
    # Of one micro-batch, on average over the ranks: then the bubble is their average idle time.
    work = sum(cost.forward_s) + sum(cost.backward_input_s) + sum(cost.backward_weight_s)
    ideal = header.total_microbatches * timeline.num_repeats * work / header.num_ranks
    makespan = timeline.makespan_s
    alike = {"contention": "contention" in timeline.notes, "rendezvous": "no_rendezvous" not in timeline.notes}
    period = steady_period_s(steady or program, cost, **alike)
    with collector_paused():
        peaks = [peak_inflight(program, rank) for rank in ranks]
        kept = [kept_inputs(program, rank) for rank in ranks]
        versions = [weight_versions(program, rank) for rank in ranks]
    bubble = 0.0
    if makespan:
        bubble = float(1 - ideal / makespan)
    over_ideal = 0.0
    if ideal:
        over_ideal = float((makespan - ideal) / ideal)
    sends = Counter(i.op for i in chain.from_iterable(program.ranks))[Op.SEND]
    return {
        "schedule": header.schedule,
        "num_stages": header.num_stages,
        "num_ranks": header.num_ranks,
        "num_microbatches": header.num_microbatches,
        "num_chunks": header.num_chunks,
        "makespan": float(makespan),
        "period": float(period),
        "bubble_fraction": bubble,
        "bubble_over_ideal": over_ideal,
        "peak_inflight": peaks,
        "kept_inputs": kept,
        "weight_versions": versions,
        "messages": sends,
        "order": list(map(list, program.order)),
    }


def steady_period_s(program: Program, cost: CostModel, *, contention: bool = False, rendezvous: bool = True) -> float:
    """Seconds per step in the steady state, without a barrier between steps.

    A synchronous program is repeated; the second pass of a single step takes as long as all later ones. An asynchronous
    one fills and drains once, so it must hold enough steps for a steady state; for a shorter one the result is the time
    of its busiest rank per step, a lower bound of the period.
    """
    header = program.header
    is_synchronous = header.weights is WeightRule.FLUSH
    if header.spill or header.num_steps > 1:
        rounds = _ROUNDS
    else:
        rounds = 2
    if is_synchronous:
        repeats = -(-rounds // header.num_steps)
    else:
        repeats = 1
    options = {"contention": contention, "rendezvous": rendezvous}
    timeline = simulate(program, cost, repeats=repeats, steps_only=True, **options)
    if is_synchronous or timeline.is_steady:
        return timeline.period_s
    timeline = simulate(program, cost, **options)
    return max(map(timeline.busy_s, range(len(program.ranks)))) / header.num_steps
