"""The programs of a training: one for each number of updates that run at a time, proved before it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from pipefit.ir.instruction import Indices
from pipefit.ir.program import Program, WeightRule
from pipefit.pipeline.memory_cap import spilled_shape
from pipefit.pipeline.nonfinite import needs_norm
from pipefit.pipeline.repairable import why_not
from pipefit.schedules import find, shape_of
from pipefit.spec import Plan
from pipefit.spec.options import Spilled
from pipefit.stage.split import NamedLayer
from pipefit.stage.ties import tied_groups
from pipefit.stage.training import Training
from pipefit.verify import verify


class Programs:
    """The programs of a plan.

    Args:
        plan: stages and ranks.
        training: its clipping and the like, for which a program may need the norm of all gradients.
        layers: of the whole model, whose shared weights tie stages.
        spill: the user's options of spilling.

    Attributes:
        plan: of the programs.
        without: those after the loss of some ranks, as far as they are prepared; None: there are none.
    """

    def __init__(self, plan: Plan, training: Training, layers: Sequence[NamedLayer], spill: Spilled | None) -> None:
        self.plan = plan
        self._schedule = find(plan.schedule)
        self._training = training
        self._ties = tied_groups(layers, plan.partition)
        self._spill = spill
        self.without: dict[Indices, Programs | None] = {}
        self._known: dict[int, Program] = {}

    def of(self, num_updates: int) -> Program:
        """The program of some updates."""
        if num_updates not in self._known:
            shape = shape_of(self.plan, num_steps=num_updates, ties=self._ties)
            shape = spilled_shape(shape, self._spill)
            clip = needs_norm(self._training, self._schedule, shape)
            # Where copies share weights, a step is committed with its copy in memory.
            commit = self.plan.shard == "none" and not why_not(self.plan)
            program = self._schedule(replace(shape, clip=clip, commit=commit))
            verify(program).raise_if_bad()
            self._known[num_updates] = program
        return self._known[num_updates]

    def shortest(self) -> Program:
        """The program of the fewest updates: replicas of a stage that take whole mini-batches need one each."""
        if self._schedule.weights in (WeightRule.STASH, WeightRule.VERTICAL):
            return self.of(math.lcm(*map(len, self.plan.placement.ranks)))
        return self.of(1)
