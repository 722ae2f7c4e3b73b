"""Zero-bubble schedules: backwards in two halves; the half that makes weight gradients fills the gaps."""

from __future__ import annotations

from functools import cache

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import bwd_input, bwd_weight, fwd
from pipefit.ir.op import Op
from pipefit.schedules.one_f_one_b import num_warmup
from pipefit.schedules.registry import Orders, Task, schedule
from pipefit.schedules.shape import Shape


def _late_weights(task: Task, depth: int) -> Orders:
    """1F1B with `depth` times its warm-up; weight halves are delayed until all stages hold as much as the first.

    A later stage has fewer micro-batches in flight than the first; it has as many pending weight halves instead.
    """
    most = depth * num_warmup(task.header, 0)
    for stage, mbs in task.one_stage_each():
        in_flight = depth * num_warmup(task.header, stage)
        warmup = min(in_flight, len(mbs))
        # A stage with fewer replicas than the first has more micro-batches in flight: nothing is delayed.
        late = min(max(most - in_flight, 0), len(mbs))
        ahead = [fwd(stage, mb) for mb in mbs]
        weights = [bwd_weight(stage, mb) for mb in mbs]
        order = ahead[:warmup]
        for done, mb in enumerate(mbs):
            if warmup + done < len(mbs):
                order.append(ahead[warmup + done])
            order.append(bwd_input(stage, mb))
            if done >= late:
                order.append(weights[done - late])
        yield order + weights[len(mbs) - late :]


@schedule(name="zb-h1")
def _h1(task: Task) -> Orders:
    """Zero-bubble H1: 1F1B whose weight gradients fill gaps; no rank holds more activations than 1F1B's first.

        F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3   rank 0
        .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3   rank 1
        .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3   rank 2

    F forward, I and W the halves of a backward for inputs and for weights, digits micro-batches; drawn for f = i = w.
    Time m(f+i+w) + (p−1)·max(f, i, f+i−w) for m ≥ p, where 1F1B takes (m+p−1)(f+i+w); min(p, m) micro-batches of
    activations on every rank, and in addition the gradients that the first half of a backward keeps for the second.
    Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) §2.1.
    """
    return _late_weights(task, 1)


@schedule(name="zb-h2", flushes=False)
def _h2(task: Task) -> Orders:
    """Zero-bubble H2: H1 with twice the warm-up; ranks are idle only before the first update and after the last.

        F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .    rank 0
        .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .    rank 1
        .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4   rank 2

    F forward, I and W the halves of a backward for inputs and for weights, digits micro-batches; drawn for f = i = w.
    Time from update to update m(f+i+w) + (p−1)·max(0, f+i−2w, i−f) for m ≥ 2p−1: a rank begins the next update when its
    own weights have stepped. Where all ranks wait for each other at every step (for the norm of clipping), it is hardly
    faster than H1. 2p−1 micro-batches of activations on every rank.
    Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) §2.2.
    """
    return _late_weights(task, 2)


def _two_chunks(shape: Shape) -> None:
    if shape.num_chunks != 2:
        raise ScheduleError(f"zb-v has two stages per rank, got {shape.num_chunks}; use 2 chunks")
    if len(set(shape.replicas)) > 1:
        raise ScheduleError(
            f"zb-v: all stages need equally many replicas (each rank holds two stages), got {list(shape.replicas)}"
        )


@schedule(name="zb-v", flushes=False, layout="wave", chunks=True, check=_two_chunks)
def _v(task: Task) -> Orders:
    """Zero-bubble V: stages go down the ranks and up again, so that all ranks hold equally much and none is idle.

        F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 I0.1 W0.1 I0.2 W0.2 W3.2 .      rank 0
        .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 I1.1 I2.2 I1.2 W1.1 W1.2 W2.1 W2.2   rank 1

    F forward, I and W the halves of a backward for inputs and for weights, their stage and micro-batch; rank 0 holds
    stages 0 and 3, rank 1 stages 1 and 2; drawn for f = i = w.
    Time 3mf + (p−1)f/2 for f = i = w and m ≥ 2p−1, and 3mf from update to update (from five ranks on a little more); p
    micro-batches of activations on every rank, as 1F1B on its first.
    The order is greedy, with one unit of time for F, I and W of every chunk: first a forward, or, where 2p chunks of
    activations are held, a weight half that makes room for it; then an input half; then a weight half; of several, the
    one at the later stage of its micro-batch.
    Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) §6, for placement and bound; not for the order.
    """
    last = task.num_stages - 1
    instructions = {Op.FWD: fwd, Op.BWD_INPUT: bwd_input, Op.BWD_WEIGHT: bwd_weight}
    for rank in range(task.num_ranks):
        stages = task.stages_of(rank)
        if len(stages) != 2 or sum(stages) != last:
            raise ScheduleError(
                f"zb-v: placement: expected stages s and {last} − s on each rank, rank {rank} has {list(stages)}"
            )
        mbs = task.microbatches_of(stages[0], rank)
        found = _found_work(task.depth, len(mbs))[stages[0]]
        yield [instructions[op](stage, mbs[index]) for op, stage, index in found]


@cache
def _found_work(depth: int, num_microbatches: int) -> list[list[tuple[Op, int, int]]]:
    """For each rank of a V, its instructions in order: operation, stage and micro-batch."""
    ended: _Ended = {}
    for op in (Op.FWD, Op.BWD_INPUT, Op.BWD_WEIGHT):
        ended[op] = [[] for _ in range(2 * depth)]
    orders: list[list[tuple[Op, int, int]]] = [[] for _ in range(depth)]
    left = 6 * num_microbatches * depth
    now = 0
    while left:
        for position, order in enumerate(orders):
            found = _next(ended, depth, num_microbatches, position, now)
            if found is not None:
                op, stage = found
                order.append((op, stage, len(ended[op][stage])))
                ended[op][stage].append(now + 1)
                left -= 1
        now += 1
    return orders


_Ended = dict[Op, list[list[int]]]
"""The end of each operation of each stage, by micro-batch."""


def _next(ended: _Ended, depth: int, num_microbatches: int, position: int, now: int) -> tuple[Op, int] | None:
    """Returns the next operation of a rank; None: it has to wait."""
    forwards, inputs, weights = ended.values()
    last = 2 * depth - 1
    stages = (position, last - position)
    weight = None
    for stage in reversed(stages):
        if len(weights[stage]) < len(inputs[stage]):
            weight = Op.BWD_WEIGHT, stage
    for stage in reversed(stages):
        index = len(forwards[stage])
        is_fed = stage == 0 or _is_there(forwards[stage - 1], index, now)
        if is_fed and index < num_microbatches:
            held = sum(len(forwards[s]) - len(weights[s]) for s in stages)
            if held < 2 * depth:
                return Op.FWD, stage
            if weight:
                return weight
    for stage in stages:
        before = forwards[last]
        if stage < last:
            before = inputs[stage + 1]
        index = len(inputs[stage])
        if index < len(forwards[stage]) and _is_there(before, index, now):
            return Op.BWD_INPUT, stage
    return weight


def _is_there(ended: list[int], index: int, now: int) -> bool:
    return index < len(ended) and ended[index] <= now
