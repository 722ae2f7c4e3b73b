"""Schedules of pipefit as strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipefit.compare.strategies import bytes_of
from pipefit.pipeline.pipeline import Pipeline
from pipefit.planner import by_hand
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.schedules import find
from pipefit.spec import Partition, Plan, Profile
from pipefit.spec.options import Parallelism, Updates
from pipefit.timeline import Timeline


def plan_of(schedule: str, num_microbatches: int, partition: Partition, profile: Profile, num_chunks: int) -> Plan:
    """The plan of a schedule: the given partition where it has one stage per rank, else one balanced by the profile."""
    chunks = num_chunks if find(schedule).chunks else 1
    plain = chunks == 1 and find(schedule).layout != "replicas"
    return by_hand(
        len(profile),
        num_ranks=current().num_ranks,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_chunks=chunks,
        stages=[len(stage.layers) for stage in partition.stages] if plain else None,
        profile=profile,
    )


class ScheduledPipeline:
    """A pipeline under one schedule.

    Args:
        work: the model and its training.
        plan: how it is split and scheduled.
        seed: of dropout.

    Raises:
        PipefitError: the schedule has no meaning for the plan's shape.
    """

    def __init__(self, work: Workload, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.pipe = Pipeline(
            work.fresh(),
            loss=work.loss,
            optimizer=work.optimizer,
            plan=plan,
            parallelism=Parallelism(device=work.device),
            updates=Updates(seed=seed),
        )

    def train(self, batches: Sequence[tuple[Any, Any]]) -> Sequence[float]:
        """Trains one update per batch; a schedule without a flush drains at the end."""
        return self.pipe.fit(list(batches), steps=len(batches))

    def timeline(self, steps: int) -> Timeline:
        """The last updates as measured; every rank calls it."""
        return self.pipe.timeline(last=self.num_passes(steps))

    def num_passes(self, steps: int) -> int:
        """Passes over the program that some updates take."""
        return steps if self.pipe.schedule.is_synchronous else 1

    @property
    def state_bytes(self) -> float:
        """Of the stages of this rank."""
        workers = self.pipe.workers
        layers = [layer.module for worker in workers for stage in worker.stages.values() for layer in stage.layers]
        return bytes_of(layers, [made for worker in workers for made in worker.optimizers.values()])
