"""Several stages per rank, looped over the ranks: interleaved 1F1B and breadth-first."""

from __future__ import annotations

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Indices, Instruction, bwd, forward_backward, fwd
from pipefit.schedules.one_f_one_b import alternate, num_warmup
from pipefit.schedules.registry import Orders, Task, schedule
from pipefit.schedules.shape import Shape


def _interleavable(shape: Shape) -> None:
    group = shape.options.get("group", 0)
    least = shape.depth
    most = max(least, shape.num_microbatches)
    if group and not least <= group <= most:
        wanted = f"{least} to {most}"
        if least == most:
            wanted = f"{least}"
        raise ScheduleError(
            f"interleaved: group: expected {wanted} micro-batches (with fewer than the "
            f"{least} ranks of the pipeline they would wait for each other), or 0 for {least}; got {group}"
        )
    if len(set(shape.replicas)) > 1:
        raise ScheduleError(
            f"interleaved: all stages need equally many replicas (ranks alternate in step), got {list(shape.replicas)}"
        )


def _ahead(p: int, m: int, v: int, rank: int) -> Indices:
    """The first slots of the forwards' order, up to the first backward, without the missing micro-batches."""
    left = 2 * (p - rank) - 1 + (v - 1) * p
    if v == 1:
        left = p - rank
    counts = [0] * v
    for first in range(0, m, p):
        for chunk in range(v):
            counts[chunk] += max(min(left, p, m - first), 0)
            left -= p
    return tuple(counts)


@schedule(name="interleaved", chunks=True, options={"group": 0}, check=_interleavable, ahead=_ahead)
def _interleaved(task: Task) -> Orders:
    """Interleaved 1F1B: groups of p micro-batches go through a rank's chunks; the bubble shrinks by v.

        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 .    B2.2 .    B2.3 B0.2 B0.3   rank 0
        .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 .      rank 1

    F2.0: forward of stage 2 on micro-batch 0; rank 0 holds stages 0 and 2, rank 1 stages 1 and 3; drawn for f = b.
    Time (m+(p−1)/v)(f+b). Option `group` sets the micro-batches of a group (0: p). The last group may be incomplete;
    counts that p divides have the shortest bubble. With one chunk per rank it is 1F1B.
    Source: Megatron-LM (SC 2021) §2.2.2, figure 4.
    """
    size = task.options["group"] or task.depth
    for rank in range(task.num_ranks):
        stages = task.stages_of(rank)
        slots = task.microbatches_of(stages[0], rank)
        # The order of a full last group without its missing micro-batches: fewer cannot cause a cycle of waits.
        while len(slots) % size:
            slots.append(-1)
        forwards = []
        backwards = []
        for start in range(0, len(slots), size):
            group = slots[start : start + size]
            forwards += [fwd(stage, mb) for stage in stages for mb in group]
            backwards += [bwd(stage, mb) for stage in reversed(stages) for mb in group]
        if task.header.num_chunks == 1:
            warmup = num_warmup(task.header, stages[0])
        else:
            position = stages[0] % task.depth
            warmup = 2 * (task.depth - 1 - position) + (len(stages) - 1) * size
        yield [i for i in alternate(forwards, backwards, warmup) if i.mb >= 0]


@schedule(name="breadth-first", chunks=True, options={"turn": 0}, ahead=lambda p, m, v, rank: (m,) * v)
def _breadth_first(task: Task) -> Orders:
    """Breadth-first: all micro-batches through one chunk, then through the next; backwards likewise.

        F0.0 F0.1 F0.2 F0.3 F2.0 F2.1 F2.2 F2.3 .    .    B2.0 B2.1 B2.2 B2.3 B0.0 B0.1 B0.2 B0.3   rank 0
        .    F1.0 F1.1 F1.2 F1.3 F3.0 F3.1 F3.2 F3.3 B3.0 B3.1 B3.2 B3.3 B1.0 B1.1 B1.2 B1.3 .      rank 1

    F2.0: forward of stage 2 on micro-batch 0; rank 0 holds stages 0 and 2, rank 1 stages 1 and 3; drawn for f = b.
    Time (m+(p−1)/v)(f+b) for m ≥ p; m micro-batches of activations. Each chunk's gradients are complete early, so their
    reduction overlaps with the remaining chunks. Option `turn` 1: at the last stage each backward follows its own
    forward, so that the stage keeps one micro-batch and need not replay it.
    Source: Breadth-First Pipeline Parallelism (MLSys 2023) §3.
    """
    return stage_by_stage(task, turns=bool(task.options["turn"]))


def stage_by_stage(task: Task, turns: bool) -> Orders:
    """All micro-batches through each stage of a rank, and back.

    Args:
        task: of the schedule.
        turns: at the last stage each backward follows its own forward.
    """
    for rank in range(task.num_ranks):
        order = []
        backwards: list[Instruction] = []
        for stage in task.stages_of(rank):
            mbs = task.microbatches_of(stage, rank)
            if turns and stage == task.num_stages - 1:
                order += forward_backward(stage, mbs)
            else:
                order += [fwd(stage, mb) for mb in mbs]
                backwards = [bwd(stage, mb) for mb in mbs] + backwards
        yield order + backwards
