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
        purpose = _PURPOSE.get(timeline.instruction(event).op)
        if purpose is not None:
            work[event.rank][purpose] += event.duration_s
    begin = min((event.start_s for event in timeline.events), default=0)
    whole = timeline.end_s - begin
    if not whole:
        return {}
    found = {}
    for purpose in _PURPOSES:
        seconds = sum(each[purpose] for each in work)
        found[purpose] = seconds / len(work) / whole
    busiest = max(sum(each.values()) for each in work) / whole
    setup = (whole - timeline.makespan_s) / whole
    imbalance = busiest - sum(found.values())
    found |= {"load imbalance": imbalance, "bubble": 1 - busiest - setup, "set-up": setup}
    return {purpose: float(share) for purpose, share in found.items()}
