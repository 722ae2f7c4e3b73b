"""What a plan should cost on the ranks at hand: the profile, the links, and what the runtime itself adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from pipefit.cost import CostModel
from pipefit.ir.op import OP_SPEC, Lane, Op
from pipefit.ir.program import Program
from pipefit.schedules import find
from pipefit.simulate import simulate
from pipefit.spec import Partition, Plan, Prediction, Profile, Topology
from pipefit.timeline import Timeline

__all__ = ["USUAL", "RuntimeCosts", "cost_of", "predict", "prediction_of"]


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane that `host_s` does not name, beyond what the profile measured.
        post_s: of posting one message.
        host_s: on instructions by operation, beyond what the profile measured.
        pass_s: of a rank between two passes over a synchronous program.
        cut_s: of cutting the batch, for each of its micro-batches.
        copy_s_per_byte: of a send, on the sender's core.
        taking_s: of a forward or replay that takes a message, beyond `host_s`.
        arrival_s: on a message that has come, where no core is left for the threads that carry it.
        fit_s: of a call that trains some steps, beyond its passes.
    """

    overhead_s: float
    post_s: float
    host_s: Mapping[str, float] = MappingProxyType({})
    pass_s: float = 0.0
    cut_s: float = 0.0
    copy_s_per_byte: float = 0.2e-9
    taking_s: float = 0.0
    arrival_s: float = 0.0
    fit_s: float = 0.0

    def scaled(self, factor: float) -> RuntimeCosts:
        """The costs on a machine that takes so many times as long for everything but copying."""
        host_s = {name: seconds * factor for name, seconds in self.host_s.items()}
        plain = ("overhead_s", "post_s", "pass_s", "cut_s", "taking_s", "arrival_s", "fit_s")
        return self._replace(host_s=host_s, **{name: getattr(self, name) * factor for name in plain})


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Where nothing was measured: ranks in one process, or a GPU, whose work hides it."""


def cost_of(
    profile: Profile,
    plan: Plan,
    topology: Topology,
    state_per_weight: float = 2.0,
    runtime: RuntimeCosts = USUAL,
) -> CostModel:
    """Costs of the plan's stages on these links, with what the executor itself costs.

    Args:
        profile: of the whole model in one process; with tensor parallelism, of what each process of a rank has of it
            (`pipefit.calibrate.parts`).
        plan: how it is divided.
        topology: links between the processes.
        state_per_weight: optimizer bytes per weight byte.
        runtime: what the executor costs.
    """
    # The profile is one of parts already: nothing is left to divide.
    partition = Partition(tuple(msgspec.structs.replace(stage, tensor=1) for stage in plan.partition.stages))
    cost = CostModel.from_profile(
        profile,
        partition,
        topology,
        optimizer_bytes_per_weight_byte=state_per_weight,
        loss_s=profile.loss_s,
        overhead_s=runtime.overhead_s,
        post_s=runtime.post_s,
        copy_s_per_byte=runtime.copy_s_per_byte,
    )
    if runtime.taking_s:
        first, *beyond = cost.forward_s
        cost = replace(cost, forward_s=(first, *(seconds + runtime.taking_s for seconds in beyond)), recompute_s=())
    # Each replica steps, and keeps the states of, its part.
    parts = [len(ranks) if plan.sharded_optimizer else 1 for ranks in plan.placement.ranks]
    cost = replace(cost, optim_bytes=tuple(size / num for size, num in zip(cost.optim_bytes, parts, strict=True)))
    steps = tuple(
        profile.optimizer_of(stage.layers) / num for stage, num in zip(plan.partition.stages, parts, strict=True)
    )
    synchronous = find(plan.schedule).is_synchronous
    host_s = dict(runtime.host_s)
    if host_s and not synchronous:
        # One pass holds all steps: its batches are cut as they are loaded.
        host_s[Op.LOAD.value] += runtime.cut_s
    pass_s = runtime.pass_s + runtime.cut_s * plan.num_microbatches if synchronous else 0.0
    on_host = cost.host_step_s if any(cost.host_step_s) else steps
    return replace(
        cost,
        step_s=steps,
        host_step_s=on_host,
        host_s=host_s,
        arrival_s=runtime.arrival_s,
        pass_s=pass_s,
        tensor=plan.tensor,
    )


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
