"""The time of a step by its purposes: the shares of computation and of each overhead."""

from __future__ import annotations

from collections import Counter

from pipefit.ir.op import Op
from pipefit.timeline.timeline import Timeline

_PURPOSE = {Op.RECOMPUTE: "recompute", Op.STEP: "weight update"}


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Shares of a timeline, on average over the ranks; together 1.

    Load imbalance is the work of the busiest rank beyond the average; the bubble is the time in which not even the
    busiest rank works; set-up comes before the first forward. Source: Huang et al., GPipe (NeurIPS 2019), table 4.

    Args:
        timeline: simulated or measured.
    """
    work: list[Counter[str]] = [Counter() for _ in timeline.program.ranks]
    for event, instruction in timeline.compute():
        work[event.rank][_PURPOSE.get(instruction.op, "compute")] += event.duration_s  # type: ignore[assignment]
    for event in timeline.events:
        if timeline.instruction(event).op is Op.STEP:
            work[event.rank]["weight update"] += event.duration_s  # type: ignore[assignment]
    whole = timeline.end_s - min((event.start_s for event in timeline.events), default=0)
    num, purposes = len(work), ("compute", "weight update", "recompute")
    if not whole:
        return {}
    found = {purpose: sum(each[purpose] for each in work) / num / whole for purpose in purposes}
    busiest = max(sum(each.values()) for each in work) / whole
    setup = (whole - timeline.makespan_s) / whole
    found |= {"load imbalance": busiest - sum(found.values()), "bubble": 1 - busiest - setup, "set-up": setup}
    return {purpose: float(share) for purpose, share in found.items()}
