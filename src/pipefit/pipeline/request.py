"""The plan of a request: the one place where stages, ranks and schedule are decided.

A plan comes from (in this order) the request; the records of the run that is resumed; the search under a memory cap;
the search over all schedules ("auto"); or the user's own stages and ranks, balanced by a measured
profile, or by FLOP and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipefit.cost import FREE, of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.errors import DisagreementError, PlanError
from pipefit.parallel import widths_of
from pipefit.pipeline.facts import CURE, facts_of, facts_of_plan
from pipefit.pipeline.fewer import fitting
from pipefit.pipeline.layer_sizes import layer_costs, state_per_weight
from pipefit.pipeline.memory_cap import plan_under_cap
from pipefit.pipeline.resume import recorded_plan, resumed_folder
from pipefit.planner import by_hand, ranks_of
from pipefit.planner import plan as search
from pipefit.planner.simulated import update_s
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.links import links_of
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import check_alike
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.outliving import earlier, kept
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.options import AUTO, Request, Updates
from pipefit.spec.plan import INSIDE, Shard
from pipefit.stage.replay import check_attention
from pipefit.stage.split import num_frozen

_COUNTS = (2, 4, 8, 16)
"""Micro-batches per update from which the schedule "auto" chooses."""


class Measured(NamedTuple):
    """Measurements from which a plan is made.

    Attributes:
        profile: of the layers, at every size to choose from.
        topology: of the machine.
    """

    profile: Profile
    topology: Topology


class Decision(NamedTuple):
    """A plan with its profile and topology.

    Attributes:
        plan: the plan found.
        profile: of the layers, where they were measured.
        topology: of the machine, where it was measured.
    """

    plan: Plan
    profile: Profile | None = None
    topology: Topology | None = None


def agreed_plan(request: Request, work: Workload, updates: Updates, session: Session) -> Decision:
    """The plan for a request of `Pipeline`, which every rank makes alike.

    Raises:
        DisagreementError: on every rank: the requests, models or plans differ.
    """
    check_alike(session, lambda: facts_of(request, work, updates), DisagreementError, CURE)
    decision = decide(request, work, session)
    check_alike(session, lambda: facts_of_plan(decision.plan), DisagreementError, CURE)
    return decision


def decide(
    request: Request,
    work: Workload,
    session: Session,
    measure: bool = False,
    known: Measured | None = None,
) -> Decision:
    """The plan for a request; the same on every rank.

    Args:
        request: of the user.
        work: the model and its training.
        session: the ranks of the run.
        measure: also measure the layers and the machine where the plan does not need it.
        known: measured before at the sizes of `measured_sizes`; without a cap on memory nothing is measured then.

    Raises:
        PlanError: the request contradicts itself, the model or the ranks.
        InfeasibleError: nothing fits into the memory.
    """
    if isinstance(request.plan, Decision):
        return request.plan
    is_measured = measure or (request.plan is None and AUTO in (request.stages, request.schedule))
    name = f"decision-{len(session.decisions)}"
    before = None
    if is_measured or request.is_capped:
        session.decisions.append(name)
        before = earlier(session, name, Decision, session.start.full)
        if before is not None and request.schedule == AUTO:
            before = None  # all plans for these ranks are measured and searched anew
        elif before is not None:
            request = replace(request, plan=before.plan)
    profile = None
    if before is not None:
        profile = before.profile

    def plan_of(other: Request, count: int) -> Plan:
        return given_plan(other.plan) or _spelled_out(other, work, session, profile, count)

    request = fitting(request, session, plan_of, _predicted(before, request, work))
    if name in session.decisions:
        return kept(session, name, Decision, lambda: _decided(request, work, session, measure, before or known))
    return _decided(request, work, session, measure)


def _predicted(before: Decision | None, request: Request, work: Workload) -> Callable[[Plan], float] | None:
    """The predicted seconds of an update by a plan, from what an earlier start has measured; None: too little."""
    if before is None or before.profile is None or work.example is None or request.spill is not None:
        return None
    profile, x = before.profile, work.example[0]
    topology = before.topology or Topology.local(before.plan.num_processes)

    def seconds_of(plan: Plan) -> float:
        of_size = profile.at(largest_part(x, plan.num_microbatches))
        if plan.tensor > 1:
            of_size = tensor_shard(of_size, plan.tensor, topology)
        return update_s(plan, of_plan(of_size, plan, topology, runtime=FREE))[1]

    return seconds_of


def _decided(
    request: Request, work: Workload, session: Session, measure: bool, before: Decision | Measured | None = None
) -> Decision:
    """The decision; layers and links that were measured before are not measured again."""
    spill = request.spill
    plan = given_plan(request.plan)
    if work.compiler is not None:
        _check_can_compile(plan.tensor if plan else request.parallelism.tensor, request.is_capped)
    if plan is None and spill is not None and spill.resume is not False:
        if measure or request.is_capped or request.stages == AUTO:
            plan = recorded_plan(resumed_folder(spill), session.rank)
    profile = None
    topology = None
    if request.is_capped and (measure or plan is None):
        found, profile, topology = plan_under_cap(request, work, session)
        plan = plan or found
    else:
        if measure or (plan is None and AUTO in (request.stages, request.schedule)):
            if before:
                profile, topology = before.profile, before.topology
            else:
                profile, topology = _measured(request, plan, work, session, is_run=measure)
        if plan is None:
            plan = _new_plan(request, profile, topology, work, session)
    plan = _with_sharding(plan, request.parallelism.shard)
    return Decision(fitted(plan, work, session), profile, topology)


def fitted(plan: Plan, work: Workload, session: Session) -> Plan:
    """The plan with the number of stages that train nothing in this model.

    Raises:
        PlanError: it is for another number of processes, or cannot replay these layers.
    """
    _check_ranks(session, plan)
    _check_can_replay(plan, work)
    return msgspec.structs.replace(plan, frozen=num_frozen(work.layers, plan.partition))


def _check_can_compile(tensor: int, is_capped: bool) -> None:
    """Refuses what layers cannot do that train by torch.compile.

    Raises:
        PlanError: they would communicate inside, or keep other bytes than those that a cap was planned with.
    """
    if tensor > 1:
        raise PlanError(
            f"compile: the processes of a tensor-parallel rank communicate inside their layers, where torch.compile "
            f"cannot follow; give tensor=1 (got {tensor}), or train without compile"
        )
    if is_capped:
        raise PlanError(
            "compile: the plan for a cap on the device's memory counts the bytes that layers keep as they are, not "
            "compiled; leave out device_memory (stages also spill without it), or train without compile"
        )


def _check_can_replay(plan: Plan, work: Workload) -> None:
    """Refuses replays inside backwards of layers that are compiled, and of attention that is not there.

    Raises:
        PlanError: they cannot be replayed so.
    """
    for kind in {stage.replays for stage in plan.partition.stages}.intersection(INSIDE):
        if work.compiler is not None:
            raise PlanError(
                f"recompute {kind}: layers that are compiled cannot be replayed inside their backward; use recompute "
                "stage, or train without compile"
            )
        if kind == "selective":
            check_attention(work.layers)


def given_plan(plan: Any) -> Plan | None:
    """The plan of a request: a plan, the result of `pipefit.plan`, or its file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    return plan.plan


def _measured(
    request: Request, plan: Plan | None, work: Workload, session: Session, is_run: bool
) -> tuple[Profile, Topology | None]:
    """Measures the layers at the micro-batch sizes to choose from, and the links."""
    sizes = _sizes(request, plan, work)
    # Many sizes are measured with fewer repetitions, so that the choice does not take longer than a short run.
    if len(sizes) > 1:
        profile = agreed_profile(work, sizes, session, repeats=5, warmup=1)
    else:
        profile = agreed_profile(work, sizes, session)
    if not (is_run or request.schedule == AUTO):
        return profile, None
    if plan:
        num_processes = plan.num_processes
    else:
        num_processes = request.parallelism.ranks or session.num_ranks
    return profile, links_of(session, num_processes, work.device)


def measured_sizes(request: Request, work: Workload) -> list[int]:
    """The micro-batch sizes at which the layers are measured for a request.

    Raises:
        PlanError: there is no example.
    """
    return _sizes(request, given_plan(request.plan), work)


def _sizes(request: Request, plan: Plan | None, work: Workload) -> list[int]:
    x = work.batch("stages or schedule auto, which measures the layers first,")[0]
    if plan is not None:
        counts = [plan.num_microbatches]
    elif request.schedule == AUTO and request.microbatches is None:
        counts = [count for count in reversed(_COUNTS) if count <= largest_part(x, 1)]
    else:
        counts = [request.num_microbatches]
    return list(dict.fromkeys(largest_part(x, count) for count in counts))


def _new_plan(
    request: Request, profile: Profile | None, topology: Topology | None, work: Workload, session: Session
) -> Plan:
    """A plan by search, or by the request's own stages and ranks."""
    spread = request.parallelism
    if request.schedule == AUTO:
        if spread.shares:
            raise PlanError("shares: schedule auto chooses them by the speeds of the ranks; leave them out")
        assert profile is not None and topology is not None and work.example is not None
        batch = largest_part(work.example[0], 1)
        sizes = [profile.microbatch_size, *(other.microbatch_size for other in profile.others)]
        widest = session.num_ranks
        if work.compiler:
            widest = 1
        shard = AUTO
        if spread.shard != "none":
            shard = spread.shard
        recompute = None
        if spread.recompute != "none":
            recompute = spread.recompute
        return search(
            profile,
            topology,
            global_batch=batch,
            microbatch_sizes=[size for size in sizes if not batch % size] or None,
            num_microbatches=request.microbatches,
            state_per_weight=state_per_weight(work.layers, work.optimizer),
            tensors=widths_of([layer.module for layer in work.layers], widest),
            shard=shard,
            recompute=recompute,
        )
    return _spelled_out(request, work, session, profile)


def _spelled_out(
    request: Request, work: Workload, session: Session, profile: Profile | None = None, count: int | None = None
) -> Plan:
    """The plan of a request's own stages and ranks, for some number of processes; None: those of the session."""
    spread, stages = request.parallelism, request.stages
    in_one_rank = spread.ranks in (None, 1) and not session.is_distributed
    if request.spill is not None and in_one_rank:
        usual = "spilled"
    else:
        usual = "1f1b"
    if count is None:
        if session.is_distributed:
            count = session.num_ranks
        else:
            count = spread.ranks
    num_ranks = _num_ranks(request, count)
    is_open = profile is None and (stages is None or isinstance(stages, int))
    if is_open and num_ranks * spread.chunks > 1:
        costs = layer_costs(work)
    else:
        costs = None
    counts = None
    if isinstance(stages, Sequence) and not isinstance(stages, str):
        counts = list(stages)
    return by_hand(
        len(work.layers),
        num_ranks=num_ranks,
        schedule=request.schedule or usual,
        num_microbatches=request.num_microbatches,
        num_chunks=spread.chunks,
        stages=counts,
        replicas=spread.copies,
        recompute=spread.recompute,
        tensor=spread.tensor,
        sequence_parallel=spread.sequence_parallel,
        scatter_gather=not spread.whole_messages,
        shares=tuple(map(int, spread.shares)),
        shard=spread.shard,
        options=dict(spread.options),
        profile=profile,
        costs=costs,
        model=work.model,
    )


def _num_ranks(request: Request, num_processes: int | None) -> int:
    """The number of ranks: processes / t where the processes are known; else as many as stages and replicas need.

    Raises:
        PlanError: these contradict each other.
    """
    spread, stages = request.parallelism, request.stages
    if isinstance(stages, str) and stages != AUTO:
        raise PlanError(f'stages: expected a number, a list of layer counts or "auto", got {stages!r}')
    if num_processes is not None:
        return ranks_of(num_processes, spread.tensor, spread.data_parallel)
    if len(spread.copies) > 1:
        return sum(spread.copies)
    if stages is None or isinstance(stages, str):
        count = 2 * spread.chunks
    elif isinstance(stages, int):
        count = stages
    else:
        count = len(stages)
    if count < 1 or count % spread.chunks:
        raise PlanError(f"{count} stages cannot be spread as {spread.chunks} chunks per rank")
    copies = 1
    if spread.copies:
        copies = spread.copies[0]
    return count // spread.chunks * copies


def _with_sharding(plan: Plan, shard: Shard) -> Plan:
    """The plan whose copies share what the user requests, or else what the plan says.

    Raises:
        PlanError: no stage has a second replica, so there is nothing to shard it over.
    """
    if shard == "none":
        shard = plan.shard
    if shard != "none" and all(len(ranks) == 1 for ranks in plan.placement.ranks):
        raise PlanError(
            f"shard={shard!r}: the replicas of a stage share it, but every stage is on one rank only (d = 1); "
            "replicate the stages (replicas=2, or schedule data-parallel), or leave it out"
        )
    return msgspec.structs.replace(plan, shard=shard)


def _check_ranks(session: Session, plan: Plan) -> None:
    """Checks that the plan is for the number of processes that were started.

    Raises:
        PlanError: it is not.
    """
    wanted = plan.num_processes
    if session.is_distributed and session.num_ranks != wanted:
        if plan.tensor > 1:
            each = f" of {plan.tensor} processes"
        else:
            each = ""
        raise PlanError(
            f"the plan is for {plan.placement.num_ranks} ranks{each}, but {session.num_ranks} processes were started; "
            f"start {wanted}, or plan again"
        )
