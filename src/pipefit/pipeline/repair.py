"""The repair of a training in place: its plan without the ranks that are lost, for those that are left."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

from pipefit.errors import CommunicationError, PipefitError, PlanError
from pipefit.pipeline.growing import Growing, without
from pipefit.pipeline.programs import Programs
from pipefit.pipeline.rearrange import rearrange
from pipefit.pipeline.repairable import why_not
from pipefit.runtime.repairs import NOT_NEEDED, Loss
from pipefit.runtime.session import current
from pipefit.spec import Plan

MOST_PREPARED = 16
"""Ranks of a plan for whose losses there are programs in advance: for more ranks each takes longer, and more memory."""


class Repair:
    """The repair of a training. Of several pipelines the one that is in use is repaired, the others when they are used.

    Args:
        pipe: that is trained.

    Attributes:
        growing: the growth of the training after repairs.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = weakref.ref(pipe)
        self._following = pipe.programs
        self._known = 0
        self.growing = Growing(pipe)
        if pipe.session.repairs is not None:
            self._known = len(pipe.session.repairs.losses)
        self.take_over()

    def take_over(self) -> None:
        """Makes this pipeline the one that is repaired; it follows the losses since it was in use."""
        session = current()
        pipe = self._pipe()
        if session.repairs is None or pipe is None or session.repairs.check == self.check:
            return
        session.repairs.check = self.check
        session.repairs.mend = self.mend
        session.repairs.door.growing = self.growing
        session.repairs.listen(why_not(pipe.plan))
        missed = session.repairs.losses[self._known :]
        if missed:
            plan = pipe.plan
            for loss in missed:
                plan = _without(pipe, plan, _ranks_of(plan, loss))
            try:
                rearrange(pipe, plan, session, is_restored=pipe.plan.shard != "none")
            except PipefitError as why:
                raise CommunicationError(f"the run does not go on without the lost ranks: {why}") from None
            self._known += len(missed)

    def prepare(self) -> None:
        """Plans the loss of one more rank and proves the program without it, after a step; not after the first one."""
        pipe: Any = self._pipe()
        prepared = pipe.programs.without
        if not len(prepared) < pipe.plan.placement.num_ranks <= MOST_PREPARED:
            return
        if not why_not(pipe.plan) and len(pipe.loop.own_passes(2)) == 2:
            lost = (len(prepared),)
            prepared[lost] = None
            with contextlib.suppress(PipefitError):
                programs = _programs_without(pipe, lost)
                programs.shortest()
                prepared[lost] = programs

    def check(self, loss: Loss) -> None:
        """Finds the plan for the ranks that are left.

        Raises:
            PipefitError: there is none, no rank that is left has the state of a stage, or a step cannot be repeated.
        """
        pipe = self._pipe()
        if pipe is None:
            raise PipefitError("the pipeline is gone")
        lost = _ranks_of(pipe.plan, loss)
        if pipe.session.rank // pipe.plan.tensor in lost:
            # The launcher then reports it to the others as lost, too.
            os._exit(NOT_NEEDED)
        memory = pipe.loop.memory
        if pipe.plan.shard == "none":
            pipe.loop.check_repeatable()
        elif memory is None or not memory.is_newest():
            raise PipefitError("copies of a stage share its weights, and the last step has no copy in memory")
        self._following = pipe.programs.without.get(tuple(lost)) or _programs_without(pipe, lost)

    def mend(self, loss: Loss) -> None:
        """Goes on by the plan for the ranks that are left, in new process groups."""
        pipe = self._pipe()
        session = current().without(loss)
        assert pipe is not None and session.repairs is not None
        following = self._following
        self.growing.leave(pipe.plan)
        rearrange(pipe, following.plan, session, following, is_restored=pipe.plan.shard != "none")
        self._known = len(session.repairs.losses)
        session.repairs.listen(why_not(pipe.plan))
        if pipe.recovery is not None:
            pipe.recovery.mended()


def _ranks_of(plan: Plan, loss: Loss) -> list[int]:
    """The ranks of a plan that have lost a process."""
    return sorted({process // plan.tensor for process in loss.lost})


def _programs_without(pipe: Any, lost: Sequence[int]) -> Programs:
    return Programs(_without(pipe, pipe.plan, lost), pipe.training, pipe.layers, None)


def _without(pipe: Any, plan: Plan, lost: Sequence[int]) -> Plan:
    """The plan of a pipeline without ranks that are lost."""
    # The machine's memory has the last step of every stage, where each step is copied.
    is_kept = pipe.recovery is not None and pipe.recovery.every == 1
    for stage, ranks in enumerate(plan.placement.ranks):
        if set(ranks) <= set(lost) and not is_kept:
            raise PlanError(f"no copy of stage {stage} is left")
    return without(pipe, plan, lost)
