"""Hydra's spilled execution: a model larger than its device, one stage after the other through the device's slots."""

from __future__ import annotations

from pipefit.schedules.looped import stage_by_stage
from pipefit.schedules.registry import Orders, Task, schedule


@schedule(name="spilled", layout="single", chunks=True, spills=True)
def _spilled(task: Task) -> Orders:
    """Spilled execution (Hydra): stages fetched one after the other to one device, all micro-batches at each visit.

        .    F0.0 F0.1 F1.0 F1.1 F2.0 B2.0 F2.1 B2.1 S2   B1.0 B1.1 S1   B0.0 B0.1 S0   .    compute
        f0   f1        f2                                 f0                                 to the device
                                                          e2             e1             e0   back

    F forward, B backward with its replay, S step, f fetch, e evict, each with its stage, digits after the point
    micro-batches; drawn for two slots, and weights only. A stage is fetched once for the forwards of all micro-batches
    and once for their backwards, so the bytes moved do not grow with their number; at the turn the stage stays, and
    each backward follows its own forward: one micro-batch of activations, and nothing to replay.
    Source: Nagrecha and Kumar, Hydra (VLDB 2022) §4.
    """
    return stage_by_stage(task, turns=True)
