"""The costs of a plan on the ranks of a run, and its prediction."""

from __future__ import annotations

from pipefit.calibrate.overhead import runtime_costs
from pipefit.calibrate.tensor_shard import profile_of_shard
from pipefit.cost import CostModel, RuntimeCosts, of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.profiling.workload import Workload
from pipefit.runtime.outliving import kept
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Prediction, Profile, Topology
from pipefit.stage.materialise import is_meta
from pipefit.timeline import Timeline


def costs_on_ranks(
    plan: Plan,
    profile: Profile,
    topology: Topology,
    session: Session,
    work: Workload,
    state_per_weight: float,
    runtime: RuntimeCosts | None = None,
) -> CostModel:
    """Returns the costs of a plan on these ranks; all of them make the same call.

    Args:
        plan: the plan.
        profile: of the whole model at the plan's micro-batch size.
        topology: the links between the processes of the run.
        session: of the run.
        work: the model and its training; under tensor parallelism its sharded layers are measured too, or computed
            where they have no weights yet.
        state_per_weight: bytes of optimizer states per byte of weights.
        runtime: costs of the executor; None: measured now.
    """
    profile = profile_on_ranks(plan, profile, topology, session, work)
    runtime = runtime or kept(session, "runtime", RuntimeCosts, lambda: runtime_costs(session, topology))
    return of_plan(profile, plan, topology, state_per_weight=state_per_weight, runtime=runtime)


def profile_on_ranks(plan: Plan, profile: Profile, topology: Topology, session: Session, work: Workload) -> Profile:
    """Returns the profile of one process of a rank: under tensor parallelism of a shard, measured or computed.

    All ranks make the same call; the arguments are those of `costs_on_ranks`.
    """
    if plan.tensor == 1:
        return profile
    if is_meta(work.layers):
        return tensor_shard(profile, plan.tensor, topology)
    return profile_of_shard(work, plan, session, topology)


def prediction_of(timeline: Timeline, batch: int) -> Prediction:
    """Returns a simulated timeline as a plan's prediction; `batch` samples per step."""
    period = timeline.period_s
    return Prediction(
        step_s=timeline.makespan_s / timeline.num_repeats / timeline.program.header.num_steps,
        period_s=period,
        minibatch_s=period,
        throughput=batch / period if period else 0.0,
        peak_bytes=tuple(map(timeline.peak_bytes, range(len(timeline.program.ranks)))),
    )
