"""Search under a cap on the devices' memory: a plan without spilling if one fits; else the fastest one that spills.

A candidate that spills has a lower bound, the limit of its lanes. So candidates are simulated in the order of their
bounds, until no remaining bound is below the best simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from pipefit.errors import InfeasibleError, PlanError
from pipefit.partition import minmax
from pipefit.planner.candidate import Estimate, costs_of, plan_of, program_for
from pipefit.planner.cuts import cut
from pipefit.planner.estimate import estimate
from pipefit.planner.methods import problem_of
from pipefit.planner.search import SIMULATION, Frontier, SearchResult
from pipefit.planner.simulated import simulated
from pipefit.planner.space import NOT_FROM_DISK, Cap, Config, Problem
from pipefit.planner.spilled_candidates import has_room, layers_of, spilled_configs
from pipefit.schedules import find
from pipefit.schedules.registry import Schedule
from pipefit.spec import Candidate, Profile, Topology
from pipefit.spec.options import STEP_ON
from pipefit.spec.topology import Tier
from pipefit.units import counted, format_bytes, format_seconds

_MOST_FORWARDS = 30_000
"""Limit of all simulated programs together: a few seconds of simulation."""
_AGAIN_BYTES = 8 << 10
"""Memory beside tensors differs by some KiB when layers are measured again, for the cap that a message has named."""
_NUM_SIMULATED = 8
"""Number of candidates with the least memory that are simulated, where none fits."""


def problem_under_cap(
    profile: Profile,
    topology: Topology,
    cap: Cap,
    num_microbatches: int,
    microbatch_size: int,
    state_per_weight: float | None,
    schedule: str | None,
) -> tuple[Problem, Config]:
    """The problem, and the candidate that spills nothing, not yet cut.

    Raises:
        PlanError: an argument that makes no sense, or no such tier.
    """
    if not cap.device_bytes > 0:
        raise PlanError(f"device_bytes: expected more than 0, got {cap.device_bytes}")
    problem = problem_of(profile, topology, microbatch_size * num_microbatches, state_per_weight)
    tier = _tier(topology, cap.tier)
    if cap.step_on not in STEP_ON:
        raise PlanError(f"step_on: expected one of {', '.join(STEP_ON)}, got {cap.step_on!r}")
    if cap.step_on == "host" and tier.name != "host":
        raise PlanError(f"step_on: {NOT_FROM_DISK}")
    _check_ranks(cap, topology, profile)
    usual = "breadth-first"
    if cap.depth == 1:
        usual = "spilled"
    order = find(schedule or usual)
    _check_schedule(order, cap)
    known = replace(cap, tier=tier.name)
    if cap.host_bytes is None:
        known = replace(known, host_bytes=tier.capacity_bytes)
    if not problem.state:
        known = replace(known, step_on="device")
    if not order.chunks:
        known = replace(known, num_chunks=1)
    problem.cap = known
    return problem, Config(order.name, cap.copies, cap.depth, 1, 1, microbatch_size, num_microbatches)


def _tier(topology: Topology, name: str | None) -> Tier:
    found = [tier for tier in topology.tiers if name in (None, tier.name)]
    if not found:
        raise PlanError(
            f'the topology has no tier {name or "to spill to"!r}: add [[tiers]] with name = "{name or "host"}", '
            "capacity_bytes, read_bytes_per_s and write_bytes_per_s"
        )
    return found[0]


def _check_ranks(cap: Cap, topology: Topology, profile: Profile) -> None:
    if cap.copies < 1 or cap.num_ranks % cap.copies:
        raise PlanError(
            f"{cap.num_ranks} ranks cannot be {cap.copies} copies of a pipeline; take a multiple of {cap.copies}"
        )
    if cap.num_ranks > topology.num_devices or cap.depth > len(profile):
        raise PlanError(
            f"num_ranks: expected at most the {topology.num_devices} devices of the topology, and as many in a "
            f"pipeline as the {len(profile)} layers of the model, got {cap.num_ranks}"
        )


def _check_schedule(order: Schedule, cap: Cap) -> None:
    if not order.is_synchronous:
        raise PlanError(f"{order.name} does not flush, which a cap on the device's memory needs; use breadth-first")
    if order.layout == "single" and cap.depth > 1:
        raise PlanError(f"{order.name} is for one rank; for {cap.depth} use breadth-first")
    if order.layout == "replicas":
        raise PlanError(f"{order.name} has one stage, with all of the model's weights; use breadth-first")
    if cap.num_chunks > 1 and not order.chunks:
        raise PlanError(f"{order.name} has one stage per rank, got {cap.num_chunks} chunks; use breadth-first")


def search_under_cap(problem: Problem, config: Config, schedule: str | None) -> SearchResult:
    """The fastest candidate that fits under the cap without spilling; where none does, the fastest that spills.

    Activations wait on the tier only where nothing fits otherwise, or as the cap specifies.

    Args:
        problem: with a cap.
        config: the candidate that spills nothing, not yet cut.
        schedule: of the request; None: the one of the candidate if stages are spilled, else "1f1b".

    Raises:
        InfeasibleError: nothing fits; the message names the smallest cap that works.
    """
    cap = problem.capped
    if schedule is None or find(schedule).spills:
        schedule = "1f1b"
    whole = list(_residents(problem, replace(config, schedule=schedule)))
    whole.sort(key=lambda each: each.period_s)
    fitting = [each for each in whole if max(each.peak_bytes) <= cap.device_bytes]
    if fitting:
        return SearchResult((fitting[0],))
    choices = [False, True]
    if cap.activations is not None:
        choices = [cap.activations]
    on_tier = False
    winner: Estimate | None = None
    for on_tier in choices:
        frontier = _frontier(problem, config, on_tier)
        best = frontier.bounds()
        winner = frontier.nearly(_MOST_FORWARDS)
        if winner is not None:
            break
    if winner is None:
        winner = _smallest(problem, config, on_tier)
        assert winner.partition is not None
        program = program_for(problem, plan_of(problem, winner.config, winner.partition))
        costs, _ = costs_of(problem, winner.config, winner.partition)
        if max(winner.peak_bytes) > cap.device_bytes or not has_room(problem, program, costs):
            raise InfeasibleError(_nothing_fits(problem, winner))
    others = []
    for place in _PLACES:
        if place in best and place != winner.config.family:
            _, candidate = best[place]
            others.append(_candidate(problem, candidate, winner))
    return SearchResult((winner,), tuple(others), whole[0].step_s)


def _frontier(problem: Problem, config: Config, on_tier: bool) -> Frontier:
    """The candidates that spill and fit, with the limits of their lanes."""
    frontier = Frontier(problem)
    estimates = [estimate(problem, each) for each in spilled_configs(problem, config, on_tier)]
    for found in sorted(filter(attrgetter("fits"), estimates), key=_bound):
        frontier.add(found.period_s, SIMULATION, found)
    return frontier


def _residents(problem: Problem, config: Config) -> Iterator[Estimate]:
    """Candidates that spill nothing, simulated."""
    cap = problem.capped
    profile = problem.at(config.microbatch_size, 1)
    chunks = 1
    if find(config.schedule).chunks:
        chunks = max(cap.num_chunks, 1)
    kinds = ["none"]
    if config.depth > 1:
        kinds.append("stage")
    weights = [layer.weight_bytes for layer in profile.layers]
    count = config.depth * chunks
    for partition in dict.fromkeys([minmax(profile, count), minmax(profile, count, weights)]):
        for recompute in kinds:
            each = replace(config, chunks=chunks, recompute=recompute, layers=layers_of(partition))
            found = simulated(problem, Estimate(each, cut(problem, each, set())))
            assert found is not None
            yield found


def _bound(estimated: Estimate) -> tuple[float, int]:
    """The sort key: the lower bound; of equal ones first those whose copies of a stage need not wait for another's."""
    spill = estimated.config.spill
    assert spill is not None
    return round(estimated.period_s, 9), -min(spill.weights_slots, 2) - (min(spill.optim_slots, 2) or 2)


def _smallest(problem: Problem, config: Config, on_tier: bool) -> Estimate:
    """The candidate with the least device memory: the same for every cap, so that the smallest cap named works."""
    cap = replace(problem.capped, device_bytes=math.inf, host_bytes=math.inf, keep=False)
    free = replace(problem, cap=cap)
    estimates = [estimate(free, each) for each in spilled_configs(free, config, on_tier, finest=True)]
    estimates.sort(key=lambda each: max(each.peak_bytes))
    found = filter(None, (simulated(free, each) for each in estimates[:_NUM_SIMULATED]))
    return min(found, key=lambda each: (max(each.peak_bytes), each.config.num_stages))


def _nothing_fits(problem: Problem, smallest: Estimate) -> str:
    """The smallest device that works, and the layer that needs it."""
    cap = problem.capped
    profile = problem.profile
    config = smallest.config
    assert cap.host_bytes is not None
    least = max(smallest.peak_bytes)
    stages = counted(config.num_stages, "stage")
    if least <= cap.device_bytes:
        return (
            f"{profile.model} does not fit the {cap.tier}: it would keep its weights and the states of its "
            f"optimizer there, and may take {format_bytes(cap.host_bytes)}"
        )
    largest = max(profile.layers, key=lambda layer: layer.weight_bytes)
    on_each = ""
    per_rank = ""
    if cap.num_ranks > 1:
        on_each = f" on each of {cap.num_ranks} ranks"
        per_rank = " per rank"
    given, needed = cap.device_bytes + cap.taken_bytes, least + cap.taken_bytes + _AGAIN_BYTES
    return (
        f"{profile.model} cannot be trained within {format_bytes(given)} of device memory{on_each}: "
        f"the smallest cap that works is {format_bytes(needed, up=True)}, with {stages}, "
        f"one slot{per_rank} and {config.num_microbatches} micro-batches per update; its largest layer, "
        f"{largest.name}, has {format_bytes(largest.weight_bytes)} of weights, whose gradients need "
        f"{format_bytes(largest.wgrad_bytes)}"
    )


_PLACES = {
    "device": "steps on the device",
    "host": "steps on the host",
    "split": "steps on the host and the device",
}


def _candidate(problem: Problem, other: Estimate, winner: Estimate) -> Candidate:
    """The best candidate with another place of the steps, and the reason why it lost."""
    assert other.limit is not None and winner.limit is not None
    limit_s = other.limit.limit_s
    gain = winner.limit.limit_s / other.limit.limit_s
    why = f"limit {format_seconds(limit_s)} per update ({other.limit.binds} binds)"
    if gain > 1:
        why += f", {gain:.2f} × as fast at best, but slower once simulated"
    else:
        why += ", no better"
    rate = problem.global_batch / limit_s
    return Candidate(_PLACES[other.config.family], "spilled", limit_s, rate, max(other.peak_bytes), why, "at best")
