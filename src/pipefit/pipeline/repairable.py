"""Whether a training can go on by another plan, and so be repaired in place."""

from __future__ import annotations

from pipefit.runtime import repairs
from pipefit.schedules import find
from pipefit.spec import Plan
from pipefit.stage.accelerator import default_kind


def why_not(plan: Plan) -> str:
    """The reason why a run by a plan cannot go on without a rank; "": it may be able to."""
    if repairs.channel is None:
        return "nobody would report it"
    if default_kind() not in ("cpu", "cuda"):
        return f"nothing ends a wait of {default_kind()} for others"
    if why := why_lost(plan):
        return why
    if plan.tensor > 1 and default_kind() != "cpu":
        return f"ranks share layers (tensor={plan.tensor}, on {default_kind()})"
    if all(len(ranks) == 1 for ranks in plan.placement.ranks):
        return "no stage has a copy"
    return ""


def why_fixed(plan: Plan) -> str:
    """The reason why a live pipeline can neither leave nor take a plan; "": it can."""
    if why := why_lost(plan):
        return why
    if plan.shard != "none" or plan.tensor > 1:
        return f"ranks share the weights of a stage (tensor={plan.tensor}, shard={plan.shard!r})"
    return ""


def why_lost(plan: Plan) -> str:
    """The reason why a pipeline cannot leave a plan, even if no layer moves between processes; "": it can."""
    schedule = find(plan.schedule)
    if not schedule.is_synchronous:
        return f"{plan.schedule} is asynchronous"
    if plan.spill is not None or schedule.spills:
        return "stages are spilled"
    return ""
