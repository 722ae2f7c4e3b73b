"""The request of a run that was started again with other processes than it asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipefit.errors import PipefitError
from pipefit.ir.instruction import Indices
from pipefit.runtime.session import Session
from pipefit.schedules import find, shape_of
from pipefit.spec import Plan
from pipefit.spec.options import AUTO, Request
from pipefit.units import format_seconds
from pipefit.verify import verify

AS_REQUESTED = "as requested"
_log = logging.getLogger("pipefit.plan")


def fitting(
    request: Request,
    session: Session,
    plan_of: Callable[[Request, int], Plan],
    seconds_of: Callable[[Plan], float] | None = None,
) -> Request:
    """The request itself, or the nearest one that the processes left can run, the same on every rank.

    In this order: as requested, over these processes; the same stages, where a stage has fewer copies, which then get
    the micro-batches of the one that is lost; one copy of each stage, as many stages as there are ranks; 1f1b; without
    tensor parallelism. The first one whose program the verifier proves is taken; where the layers were measured, the
    one of these with the shortest predicted update.

    Args:
        request: of the user.
        session: the processes.
        plan_of: the plan that a request spells out for a number of processes.
        seconds_of: predicted seconds of an update; None: nothing was measured.
    """
    count = session.num_ranks
    full = session.start.full
    if not session.start.restart or not session.is_distributed:
        return request
    if request.plan is None and (request.is_capped or request.schedule == AUTO):
        return request  # the search makes another plan
    proved = []
    refused = []
    for what, other in _nearest(request, count, plan_of(request, full)):
        try:
            plan = plan_of(other, count)
            verify(find(plan.schedule)(shape_of(plan))).raise_if_bad()
        except PipefitError as problem:
            refused.append(f"{what}: {problem}")
            continue
        if what == AS_REQUESTED:
            return other
        proved.append((seconds_of(plan) if seconds_of else 0.0, what, other))
        if not seconds_of:
            break
    if not proved:
        raise PipefitError(f"no plan for the {count} of {full} processes that are left:\n  " + "\n  ".join(refused))
    proved.sort(key=lambda found: found[0])
    if session.rank == 0:
        times = []
        for seconds, what, _ in proved:
            if seconds:
                what += f" ({format_seconds(seconds)} per update)"
            times.append(what)
        chosen, *slower = times
        if slower:
            chosen += f"; predicted slower: {', '.join(slower)}"
        _log.warning("planned anew for %d of %d processes: %s", count, full, chosen)
    return proved[0][2]


def _nearest(request: Request, count: int, plan: Plan) -> Iterator[tuple[str, Request]]:
    """Requests for a number of processes, each with its description.

    Args:
        request: of the user.
        count: number of processes.
        plan: that all processes had.
    """
    spread = replace(request.parallelism, ranks=count)
    if request.plan is None or plan.num_processes == count:
        yield AS_REQUESTED, replace(request, parallelism=spread)
    kinds = [stage.replays for stage in plan.partition.stages]
    spread = replace(
        spread,
        chunks=plan.num_chunks,
        replicas=(),
        data_parallel=1,
        shares=(),
        tensor=plan.tensor,
        sequence_parallel=plan.sequence_parallel,
        whole_messages=not plan.scatter_gather,
        shard="none",
        recompute=next((kind for kind in kinds if kind != "none"), "none"),
        options=plan.options,
    )
    request = replace(request, plan=None, schedule=plan.schedule, microbatches=plan.num_microbatches)
    stages = [len(stage.layers) for stage in plan.partition.stages]
    before = [len(ranks) for ranks in plan.placement.ranks]
    for copies in _fewer_copies(before, count // plan.tensor):
        if plan.num_chunks == 1 and sum(copies) * plan.tensor == count:
            own = replace(spread, replicas=copies)
            if max(copies) > 1:
                own = replace(own, shard=plan.shard)
            what = f"copies of the stages {', '.join(map(str, copies))}"
            yield what, replace(request, stages=stages, parallelism=own)
    one = replace(request, stages=None, parallelism=spread)
    yield f"{plan.schedule} with one copy of each stage", one
    plain = replace(spread, chunks=1, options={})
    if plan.schedule != "1f1b":
        yield "1f1b with one copy of each stage", replace(one, schedule="1f1b", parallelism=plain)
    if plan.tensor > 1:
        plain = replace(plain, tensor=1, sequence_parallel=False, whole_messages=False)
        yield "1f1b without tensor parallelism", replace(one, schedule="1f1b", parallelism=plain)


def _fewer_copies(copies: Sequence[int], count: int) -> Iterator[Indices]:
    """Copies of the stages on fewer ranks: a stage with the most loses the next one, beginning at each stage.

    Of stages with equally many the last one comes first: its micro-batches in flight are the fewest.

    >>> list(_fewer_copies([2, 2], 3)), list(_fewer_copies([3, 1], 3))
    ([(2, 1), (1, 2)], [(2, 1)])
    """
    found = []
    for first in reversed(range(len(copies))):
        left = list(copies)
        while sum(left) > count and max(left) > 1:
            most = max(left)
            stage = first
            while left[stage] < most:
                stage = (stage - 1) % len(left)
            left[stage] -= 1
        found.append(tuple(left))
    yield from dict.fromkeys(found)
