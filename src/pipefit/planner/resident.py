"""The plan of devices that hold the whole model: what spilling is measured against, and what is run where it fits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipefit.partition.balance import minmax
from pipefit.planner.shards import peaks_of
from pipefit.planner.task import Task
from pipefit.schedules import Shape, find, generate
from pipefit.simulate import simulate
from pipefit.spec import Partition, Placement, Plan, Prediction

__all__ = ["resident"]


def resident(task: Task, size: int, schedule: str | None = None) -> Plan:
    """The fastest plan that fits the cap without spilling; where none does, the fastest.

    Args:
        task: what is to be planned.
        size: of a micro-batch, in samples.
        schedule: by which ranks take turns; None, or one that is made for spilling: "1f1b".
    """
    name = "1f1b" if schedule is None or find(schedule).spills else schedule
    plans = sorted(_plans(task, size, name), key=_period_s)
    return next((plan for plan in plans if max(_peaks(plan)) <= task.device_bytes), plans[0])


def _plans(task: Task, size: int, schedule: str) -> Iterator[Plan]:
    chunks = max(task.num_chunks, 1) if find(schedule).chunks else 1
    count = task.depth * chunks
    weights = [layer.weight_bytes for layer in task.profile.layers]
    cuts = dict.fromkeys((minmax(task.profile, count), minmax(task.profile, count, weights)))
    for partition in cuts:
        for recompute in (False, True) if task.depth > 1 else (False,):
            stages = tuple(msgspec.structs.replace(stage, recompute=recompute) for stage in partition.stages)
            yield _plan(task, size, schedule, Partition(stages))


def _plan(task: Task, size: int, schedule: str, partition: Partition) -> Plan:
    chunks = len(partition.stages) // task.depth
    shape = Shape(
        task.depth,
        task.num_microbatches,
        chunks,
        replicas=(task.copies,),
        clip=task.clip,
        ties=task.ties_of(partition),
        recompute=tuple(index for index, stage in enumerate(partition.stages) if stage.recompute),
    )
    cost, program = task.cost_of(partition), generate(schedule, shape)
    timeline = simulate(program, cost, memory=task.num_ranks > 1)
    step_s = timeline.makespan_s
    samples = size * task.num_microbatches
    return Plan(
        partition,
        Placement(program.header.placement),
        schedule,
        task.num_microbatches,
        size,
        chunks,
        data=task.copies,
        model=task.profile.model,
        method="spilled",
        prediction=Prediction(step_s, step_s, step_s, samples / step_s, peaks_of(program, cost, timeline)),
    )


def _period_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.period_s


def _peaks(plan: Plan) -> tuple[float, ...]:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes
