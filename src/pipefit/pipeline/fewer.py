"""The request of a run that was started again with other processes than it asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from pipefit.errors import PipefitError
from pipefit.runtime.session import Session
from pipefit.schedules import find, shape_of
from pipefit.spec import Plan
from pipefit.spec.options import AUTO, Request
from pipefit.verify import verify

_log = logging.getLogger("pipefit.plan")


def fitting(request: Request, session: Session, plan_of: Callable[[Request, int], Plan]) -> Request:
    """The request itself, or the nearest one that the processes left can run, the same on every rank.

    In this order: as requested, over these processes; the same stages, where a stage has fewer copies, which then get
    the micro-batches of the one that is lost; one copy of each stage, as many stages as there are ranks; 1f1b; without
    tensor parallelism. The first one whose program the verifier proves is taken.

    Args:
        request: of the user.
        session: the processes.
        plan_of: the plan that a request spells out for a number of processes.
    """
    count, full = session.num_ranks, session.start.full
    is_searched = request.plan is None and (request.schedule == AUTO or (request.spill and request.spill.cap_bytes))
    if not session.start.restart or not session.is_distributed or is_searched:
        return request
    refused = []
    for what, other in _nearest(request, count, plan_of(request, full)):
        try:
            plan = plan_of(other, count)
            verify(find(plan.schedule)(shape_of(plan))).raise_if_bad()
        except PipefitError as problem:
            refused.append(f"{what}: {problem}")
            continue
        if refused and session.rank == 0:
            _log.warning("planned anew for %d of %d processes: %s", count, full, what)
        return other
    raise PipefitError(f"no plan for the {count} of {full} processes that are left:\n  " + "\n  ".join(refused))


def _nearest(request: Request, count: int, plan: Plan) -> Iterator[tuple[str, Request]]:
    """Requests for a number of processes, each with its description.

    Args:
        request: of the user.
        count: number of processes.
        plan: that all processes had.
    """
    spread = replace(request.parallelism, ranks=count)
    if request.plan is None or plan.num_processes == count:
        yield "as requested", replace(request, parallelism=spread)
    kinds = [str(stage.recompute) for stage in plan.partition.stages]
    spread = replace(
        spread,
        chunks=plan.num_chunks,
        replicas=(),
        data_parallel=1,
        tensor=plan.tensor,
        sequence_parallel=plan.sequence_parallel,
        whole_messages=not plan.scatter_gather,
        shard_optimizer=False,
        recompute=next((kind for kind in kinds if kind != "none"), "none"),
        options=plan.options,
    )
    request = replace(request, plan=None, schedule=plan.schedule, microbatches=plan.num_microbatches)
    copies = [len(ranks) for ranks in plan.placement.ranks]
    while plan.num_chunks == 1 and sum(copies) * plan.tensor > count and max(copies) > 1:
        # Of stages with equally many copies the last one: its micro-batches in flight are the fewest.
        copies[len(copies) - 1 - copies[::-1].index(max(copies))] -= 1
    if sum(copies) * plan.tensor == count and max(copies) > 1:
        sharded = plan.sharded_optimizer
        stages = [len(stage.layers) for stage in plan.partition.stages]
        own = replace(spread, replicas=tuple(copies), shard_optimizer=sharded)
        yield f"copies of the stages: {', '.join(map(str, copies))}", replace(request, stages=stages, parallelism=own)
    one = replace(request, stages=None, parallelism=spread)
    yield f"{plan.schedule} with one copy of each stage", one
    plain = replace(spread, chunks=1, options={})
    yield "1f1b with one copy of each stage", replace(one, schedule="1f1b", parallelism=plain)
    if plan.tensor > 1:
        plain = replace(plain, tensor=1, sequence_parallel=False, whole_messages=False)
        yield "1f1b without tensor parallelism", replace(one, schedule="1f1b", parallelism=plain)
