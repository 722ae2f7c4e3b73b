"""The repair of a training in place: its plan without the ranks that are lost, for those that are left."""

from __future__ import annotations

import weakref
from typing import Any

from pipefit.errors import PipefitError, PlanError
from pipefit.pipeline.rearrange import rearrange
from pipefit.pipeline.repairable import why_not
from pipefit.planner import plan_without
from pipefit.runtime.repairs import Loss


class Repair:
    """The repair of a training.

    Args:
        pipe: that is trained; the only one of its run.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = weakref.ref(pipe)
        self._plan = pipe.plan
        own = pipe.session.repairs
        if own is None:
            return
        before = own.check
        own.check = self.check
        own.mend = self.mend
        reason = why_not(pipe.plan)
        if isinstance(getattr(before, "__self__", None), Repair):
            reason = "the run has several pipelines"
        own.listen(reason)

    def check(self, loss: Loss) -> None:
        """Finds the plan for the ranks that are left.

        Raises:
            PipefitError: there is none, or no rank that is left has the state of a stage.
        """
        pipe = self._pipe()
        if pipe is None:
            raise PipefitError("the pipeline is gone")
        plan = pipe.plan
        for stage, ranks in enumerate(plan.placement.ranks):
            if set(ranks) <= set(loss.lost):
                raise PlanError(f"no copy of stage {stage} is left")
        header = pipe.program.header
        for rank in sorted(loss.lost, reverse=True):
            plan = plan_without(plan, rank, ties=header.ties, clip=header.clip)
        self._plan = plan

    def mend(self, loss: Loss) -> None:
        """Goes on by the plan for the ranks that are left, in new process groups."""
        pipe = self._pipe()
        assert pipe is not None and pipe.session.repairs is not None
        session = pipe.session.without(loss)
        rearrange(pipe, self._plan, session)
        pipe.session.repairs.listen(why_not(pipe.plan))
        if pipe.recovery is not None:
            pipe.recovery.repaired()
