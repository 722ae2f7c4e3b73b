"""`plan`: the fastest plan for a profile and a topology, with reasons."""

from __future__ import annotations

import math
import time
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from pipefit.errors import PlanError
from pipefit.ir.collector import collector_paused
from pipefit.planner.asynchronous import plan_pipedream
from pipefit.planner.candidate import plan_of
from pipefit.planner.methods import problem_of, search_by, space_of
from pipefit.planner.plan_options import CAPPED, PlanOptions
from pipefit.planner.search import SearchResult
from pipefit.planner.space import Cap, Problem
from pipefit.planner.under_cap import problem_under_cap, search_under_cap
from pipefit.spec import Plan, Prediction, Profile, Topology
from pipefit.spec.options import refuse_unused, with_fields


@collector_paused()
def plan(profile: Profile, topology: Topology, **options: Any) -> Plan:
    """The fastest plan that fits, its prediction, and the reason why every other lost.

    >>> from pipefit.spec import Layer
    >>> layers = tuple(Layer(f"layer{i}", 1e-3, 1e-3, 1e-3, 1e3, 1e3, 1e6) for i in range(8))
    >>> found = plan(Profile("eight", 1, layers), Topology.local(2), global_batch=8)
    >>> found.placement.num_ranks, 60 < found.prediction.throughput < 1 / 0.024 * 2
    (2, True)

    Args:
        profile: seconds and bytes of the layers, at one or several micro-batch sizes.
        topology: links and devices. A plan uses all devices; one of "pipedream" may leave some idle.
        options: fields of `PlanOptions`.

    Raises:
        InfeasibleError: nothing fits; the message names the missing memory and the cheapest change that would help.
        PlanError: an argument that makes no sense, or that the method does not use.
    """
    started = time.perf_counter()
    asked = with_fields(PlanOptions, options)
    why = f"method {asked.method} does not use it; leave it out"
    if asked.cap is not None:
        why = "it is for plans without a cap, which splits and replays as it needs"
    refuse_unused(asked, asked.way, why, attrgetter("name"))
    topology = asked.machine(topology)
    if asked.cap is not None:
        made = _under_cap(profile, topology, asked.cap, asked)
    elif asked.method == "pipedream":
        if asked.microbatch_sizes:
            profile = profile.at(asked.microbatch_sizes[0])
        made = plan_pipedream(
            profile, topology, cost=asked.cost, straight=asked.straight, state_per_weight=asked.state_per_weight
        )
    else:
        problem = problem_of(profile, topology, asked.global_batch, asked.state_per_weight)
        problem.whole_messages = asked.whole_messages
        problem.blocking = asked.blocking
        found = search_by(asked.method, problem, space_of(problem, asked))
        made = _finish(problem, asked.method, found, _over_data_parallel(found))
    return replace(made, plan_seconds=time.perf_counter() - started)


def _under_cap(profile: Profile, topology: Topology, cap: Cap, asked: PlanOptions) -> Plan:
    sizes = asked.microbatch_sizes or (profile.microbatch_size,)
    schedules = asked.schedules or (None,)
    for name, given in (("microbatch_sizes", sizes), ("schedules", schedules)):
        if len(given) > 1:
            raise PlanError(f"{name}: under a cap expected one, got {', '.join(map(str, given))}")
    size = sizes[0]
    schedule = schedules[0]
    batch = asked.global_batch or 8 * size
    count = asked.num_microbatches or max(batch // size, 1)
    problem, config = problem_under_cap(profile, topology, cap, count, size, asked.state_per_weight, schedule)
    return _finish(problem, CAPPED, search_under_cap(problem, config, schedule))


def _finish(problem: Problem, method: str, found: SearchResult, over_data_parallel: float | None = None) -> Plan:
    winner = found.winner
    peaks = winner.peak_bytes
    assert winner.partition is not None
    made = plan_of(problem, winner.config, winner.partition, method)
    if len(peaks) < made.placement.num_ranks:
        # Copies hold the same values as the first pipeline.
        of_rank: dict[int, float] = {}
        for ranks, peak in zip(made.placement.ranks, peaks, strict=False):
            of_rank |= dict.fromkeys(ranks, peak)
        peaks = tuple(of_rank[rank] for rank in sorted(of_rank))
    period_s = winner.period_s
    rate = math.inf
    if period_s:
        rate = problem.global_batch / period_s
    prediction = Prediction(winner.step_s, period_s, period_s, rate, peaks, over_data_parallel)
    spill = made.spill
    if spill is not None and winner.limit is not None:
        cap = problem.capped
        limit = winner.limit
        host_bytes = cap.host_bytes
        if host_bytes == math.inf:
            host_bytes = None
        spill = replace(
            spill,
            device_bytes=cap.device_bytes,
            host_bytes=host_bytes,
            peak_bytes=max(peaks),
            limit_s=limit.limit_s,
            binds=limit.binds,
            resident_s=found.resident_s,
        )
    return replace(made, spill=spill, prediction=prediction, candidates=found.candidates)


def _over_data_parallel(found: SearchResult) -> float | None:
    """Times faster than plain data parallelism, where that fits."""
    plain = [each.period_s for each in found.outcomes if each.config.family == "data parallel"]
    if plain:
        return min(plain) / found.winner.period_s
    return None
