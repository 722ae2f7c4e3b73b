"""The time of a step by its purposes: the shares of computation and of each overhead."""

from __future__ import annotations

from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.timeline.timeline import Timeline

_PURPOSES = ("compute", "weight update", "recompute")
_PURPOSE = dict.fromkeys(COMPUTE_OPS, "compute") | {Op.RECOMPUTE: "recompute", Op.STEP: "weight update"}


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Shares of a timeline, on average over the ranks; together 1.

    Load imbalance is the work of the busiest rank beyond the average; the bubble is the time in which not even the
    busiest rank works; set-up comes before the first forward. Source: Huang et al., GPipe (NeurIPS 2019), table 4.

    Args:
        timeline: simulated or measured.
    """
    work = [dict.fromkeys(_PURPOSES, 0.0) for _ in timeline.program.ranks]
    for event in timeline.events:
        if purpose := _PURPOSE.get(timeline.instruction(event).op):
            work[event.rank][purpose] += event.end_s - event.start_s
    whole = timeline.end_s - min((event.start_s for event in timeline.events), default=0)
    if not whole:
        return {}
    found = {purpose: sum(each[purpose] for each in work) / len(work) / whole for purpose in _PURPOSES}
    busiest = max(sum(each.values()) for each in work) / whole
    setup = (whole - timeline.makespan_s) / whole
    found |= {"load imbalance": busiest - sum(found.values()), "bubble": 1 - busiest - setup, "set-up": setup}
    return {purpose: float(share) for purpose, share in found.items()}
