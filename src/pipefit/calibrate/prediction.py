"""What a plan should cost on the ranks at hand: the profile, the links, and what the runtime itself adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

from pipefit.cost import CostModel
from pipefit.ir.op import OP_SPEC, Lane, Op
from pipefit.ir.program import Program
from pipefit.simulate import simulate
from pipefit.spec import Plan, Prediction
from pipefit.timeline import Timeline

__all__ = ["predict", "prediction_of"]


def predict(
    program: Program,
    cost: CostModel,
    repeats: int = 1,
    waking: Sequence[tuple[float, float]] = (),
    vary: Callable[[float], float] | None = None,
    again: Mapping[Op, Sequence[float]] = MappingProxyType({}),
) -> Timeline:
    """The timeline that the program should have.

    Args:
        program: what runs.
        cost: seconds and bytes.
        repeats: passes over it.
        waking: (seconds a rank has waited, seconds the forward or backward after it takes longer), by the first; the
            program is simulated once to know how long ranks wait, and once more with what that costs on average.
        vary: see `simulate`.
        again: seconds that a forward or backward of each stage takes longer (or, below 0, less) right after another.
    """
    if waking or again:
        cost = _by_what_precedes(cost, simulate(program, cost, repeats=repeats), waking, again)
    return simulate(program, cost, repeats=repeats, vary=vary)


def _by_what_precedes(
    cost: CostModel, timeline: Timeline, waking: Sequence[tuple[float, float]], again: Mapping[Op, Sequence[float]]
) -> CostModel:
    """Costs with what forwards and backwards take longer for what precedes them, the mean of each stage's."""
    longer: dict[tuple[Op, int], list[float]] = {}
    free: dict[int, float] = {}
    last: dict[int, tuple[Op, int]] = {}
    for event in timeline.events:
        i = timeline.instruction(event)
        if event.position == 0:
            free[event.rank] = max(free.get(event.rank, 0.0) + cost.pass_s, event.start_s if not event.repeat else 0.0)
        if i.op in (Op.FWD, Op.BWD):
            more_s = _interpolated(waking, event.start_s - free[event.rank])
            if again and last.get(event.rank) == (i.op, i.stage):
                more_s += again[i.op][i.stage]
            longer.setdefault((i.op, i.stage), []).append(more_s)
            last[event.rank] = (i.op, i.stage)
        computes = OP_SPEC[i.op].lane is Lane.COMPUTE
        end_s = event.end_s if computes else event.start_s + cost.duration_s(i, event.rank)
        free[event.rank] = max(free[event.rank], end_s)

    def more(op: Op, seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(own + fmean(longer.get((op, stage), [0.0])), 0.0) for stage, own in enumerate(seconds))

    return replace(cost, forward_s=more(Op.FWD, cost.forward_s), backward_input_s=more(Op.BWD, cost.backward_input_s))


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the lines from (0, 0) through the points, level after the last.

    >>> [_interpolated([(1.0, 2.0), (2.0, 6.0)], x) for x in (-1.0, 0.5, 1.5, 3.0)]
    [0.0, 1.0, 4.0, 6.0]
    """
    below = (0.0, 0.0)
    for above in points:
        if x <= above[0]:
            share = max(x - below[0], 0.0) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        below = above
    return below[1]


def prediction_of(plan: Plan, timeline: Timeline, batch: int) -> Prediction:
    """A simulated timeline as a plan's prediction; `batch` samples per step."""
    ranks = range(len(timeline.program.ranks))
    period = timeline.period_s
    return Prediction(
        step_s=timeline.makespan_s / timeline.num_repeats / timeline.program.header.num_steps,
        period_s=period,
        minibatch_s=period,
        throughput=batch / period if period else 0.0,
        peak_bytes=tuple(timeline.peak_bytes(rank) for rank in ranks),
    )
