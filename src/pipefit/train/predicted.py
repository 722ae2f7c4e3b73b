"""What a plan should cost on the ranks at hand: the profile, the links, and what the runtime itself adds."""

from __future__ import annotations

import torch.distributed as dist

from pipefit.cost import CostModel
from pipefit.errors import TopologyError
from pipefit.ir.program import Program
from pipefit.runtime.session import Session
from pipefit.simulate import simulate
from pipefit.spec import Plan, Prediction, Profile, Topology
from pipefit.timeline import Timeline
from pipefit.train.calibrate import USUAL, RuntimeCosts

__all__ = ["cost_of", "links_of", "predict", "prediction_of"]

_TRIES = 3
_COPY_S_PER_BYTE = 0.2e-9
"""Gloo copies what it sends on the caller's core."""


def links_of(session: Session, num_ranks: int) -> Topology:
    """The links between the ranks of a run, measured now; those of a run in one process cost nothing.

    On a machine too busy to measure them, the usual figures of Gloo over loopback.
    """
    from pipefit.profiling import measure_links

    if not session.is_distributed:
        return Topology.local(num_ranks, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    for _ in range(_TRIES):
        dist.barrier()
        try:
            return measure_links(repeats=8)
        except TopologyError:
            continue
    return Topology.local(num_ranks)


def cost_of(
    profile: Profile, plan: Plan, topology: Topology, state_per_weight: float = 2.0, runtime: RuntimeCosts = USUAL
) -> CostModel:
    """Costs of the plan's stages on these links, with what the executor itself costs."""
    weights = sum(layer.weight_bytes for layer in profile.layers)
    return CostModel.from_profile(
        profile,
        plan.partition,
        topology,
        optimizer_bytes_per_weight_byte=state_per_weight,
        step_s_per_weight_byte=profile.optimizer_s / weights if weights else 0.0,
        loss_s=profile.loss_s,
        overhead_s=runtime.overhead_s,
        post_s=runtime.post_s,
        copy_s_per_byte=_COPY_S_PER_BYTE,
    )


def predict(program: Program, cost: CostModel, repeats: int = 1) -> Timeline:
    """The timeline that the program should have."""
    return simulate(program, cost, repeats=repeats)


def prediction_of(plan: Plan, timeline: Timeline, batch: int) -> Prediction:
    """A simulated timeline as a plan's prediction; `batch` samples per step."""
    ranks = range(len(timeline.program.ranks))
    period = timeline.period_s
    return Prediction(
        step_s=timeline.makespan_s / timeline.num_repeats / timeline.program.header.num_steps,
        period_s=period,
        minibatch_s=period,
        throughput=batch / period if period else 0.0,
        peak_bytes=tuple(timeline.peak_bytes(rank) for rank in ranks),
    )
