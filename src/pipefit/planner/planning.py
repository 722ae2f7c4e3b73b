"""`plan`: the fastest plan for a profile and a topology, with reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipefit.errors import PlanError, nearest
from pipefit.ir.collector import collector_paused
from pipefit.planner.asynchronous import plan_pipedream
from pipefit.planner.candidate import plan_of
from pipefit.planner.methods import METHODS, problem_of, search_by, space_of
from pipefit.planner.search import SearchResult
from pipefit.planner.space import Cap, Problem
from pipefit.planner.under_cap import problem_under_cap, search_under_cap
from pipefit.spec import Plan, Prediction, Profile, Topology


@collector_paused()
def plan(
    profile: Profile,
    topology: Topology,
    *,
    method: str = "auto",
    global_batch: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    num_microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    recompute: str | None = None,
    cost: str = "ring",
    straight: bool = False,
    state_per_weight: float | None = None,
    tensors: Sequence[int] | None = None,
    sharded: bool | None = None,
    cap: Cap | None = None,
    chunks: Sequence[int] | None = None,
    whole_messages: bool = False,
    blocking: bool = False,
) -> Plan:
    """The fastest plan that fits, its prediction, and the reason why every other lost.

    >>> from pipefit.spec import Layer
    >>> layers = tuple(Layer(f"layer{i}", 1e-3, 1e-3, 1e-3, 1e3, 1e3, 1e6) for i in range(8))
    >>> found = plan(Profile("eight", 1, layers), Topology.local(2), global_batch=8)
    >>> found.placement.num_ranks, 60 < found.prediction.throughput < 1 / 0.024 * 2
    (2, True)

    Args:
        profile: seconds and bytes of the layers, at one or several micro-batch sizes.
        topology: links and devices. A plan uses all devices; one of "pipedream" may leave some idle.
        method: "auto": all of depth, data width, tensor width (GPTs), chunks, micro-batch size, synchronous schedule,
            recompute, partition, replicas and sharded optimizer. "2bw", "ptdp", "gpipe" and "pipedream" follow these
            papers; "uniform" gives every stage the same number of layers.
        global_batch: samples per weight update; None: a micro-batch per device, and at least 8 micro-batches. The
            mini-batch of "pipedream" is the first of `microbatch_sizes`, else the profile's.
        microbatch_sizes: to choose from; None: those of the profile and, between the smallest and the largest of them,
            the powers of two; of a profile by arithmetic the powers of two up to 16.
        num_microbatches: per weight update, when they are given; then sizes follow from it.
        schedules: to choose from; None: those of the method.
        depths: to choose from; None: all.
        recompute: a kind of `pipefit.spec.plan.RECOMPUTE` for all stages; None: whichever is fastest.
        cost: convention of "pipedream".
        straight: no replicas, for "pipedream".
        state_per_weight: optimizer bytes per weight byte; None: 6 for 2-byte weights with Adam and a master copy (a
            profile by GPT arithmetic), else 2.
        tensors: tensor widths to choose from, which the model's layers must allow (`pipefit.parallel.widths_of`); None:
            powers of two for a GPT, but 1 on "local:N", where plans run.
        sharded: the optimizer is sharded over the copies always or never, for "auto"; None: whichever is faster.
        cap: on the devices' memory, under which stages are spilled to a tier if necessary. Then one micro-batch size
            and one schedule may be given, and the devices are the cap's; None: nothing is spilled.
        chunks: of each rank, to choose from, for schedules that have several; None: 2, 3 and 4.
        whole_messages: without scatter/gather, under tensor parallelism: each device sends the whole message.
        blocking: ranks wait for each message, as in Megatron-LM of 2021; else messages travel while ranks compute.

    Raises:
        InfeasibleError: nothing fits; the message names the missing memory and the cheapest change that would help.
        PlanError: an argument that makes no sense, or that the method does not use.
    """
    started = time.perf_counter()
    if method not in METHODS:
        raise PlanError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    choices: dict[str, Any] = {"num_microbatches": num_microbatches, "depths": depths, "tensors": tensors}
    choices |= {"schedules": schedules, "recompute": recompute, "sharded": sharded, "chunks": chunks}
    if cap is not None:
        for name, given in (("microbatch_sizes", microbatch_sizes), ("schedules", schedules)):
            if given and len(given) > 1:
                raise PlanError(f"{name}: under a cap expected one, got {', '.join(map(str, given))}")
        if microbatch_sizes:
            size = microbatch_sizes[0]
        else:
            size = profile.microbatch_size
        if schedules:
            schedule = schedules[0]
        else:
            schedule = None
        count = num_microbatches or max((global_batch or 8 * size) // size, 1)
        problem, config = problem_under_cap(profile, topology, cap, count, size, state_per_weight, schedule)
        made = _finish(problem, "spilled", search_under_cap(problem, config, schedule))
    elif method == "pipedream":
        _refuse(
            choices | {"global_batch": global_batch, "whole_messages": whole_messages, "blocking": blocking}, method
        )
        if microbatch_sizes:
            profile = profile.at(microbatch_sizes[0])
        made = plan_pipedream(profile, topology, cost=cost, straight=straight, state_per_weight=state_per_weight)
    else:
        has_wide = method not in ("auto", "ptdp") and max(tensors or [1]) > 1
        useless = {"cost": cost != "ring", "straight": straight, "tensors": has_wide}
        _refuse(useless | {"sharded": bool(sharded) and method != "auto"}, method)
        problem = problem_of(profile, topology, global_batch, state_per_weight)
        problem.whole_messages = whole_messages
        problem.blocking = blocking
        space = space_of(problem, method, microbatch_sizes=microbatch_sizes, **choices)
        found = search_by(method, problem, space)
        made = _finish(problem, method, found, _over_data_parallel(found))
    return msgspec.structs.replace(made, plan_seconds=time.perf_counter() - started)


def _refuse(arguments: Mapping[str, object], method: str) -> None:
    """Refuses arguments that were given to a method which does not use them."""
    for name, given in arguments.items():
        if given:
            raise PlanError(f"{name}: method {method} does not use it; leave it out")


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
        spill = msgspec.structs.replace(
            spill,
            device_bytes=cap.device_bytes,
            host_bytes=host_bytes,
            peak_bytes=max(peaks),
            limit_s=limit.limit_s,
            binds=limit.binds,
            resident_s=found.resident_s,
        )
    return msgspec.structs.replace(made, spill=spill, prediction=prediction, candidates=found.candidates)


def _over_data_parallel(found: SearchResult) -> float | None:
    """Times faster than plain data parallelism, where that fits."""
    plain = [each.period_s for each in found.outcomes if each.config.family == "data parallel"]
    if plain:
        return min(plain) / found.winner.period_s
    return None
