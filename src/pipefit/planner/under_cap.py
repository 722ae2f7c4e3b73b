"""Search under a cap on the devices' memory: what fits is not spilled; else the fastest cut, slots and places to step.

A candidate that spills has a lower bound, the limit of its lanes. So candidates are simulated in the order of their
bounds, until no bound that is left is below the best simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipefit.cost import CostModel, usual_state
from pipefit.errors import InfeasibleError, PlanError
from pipefit.ir.program import Program
from pipefit.partition import minmax
from pipefit.planner.candidate import Estimate, costs_of, plan_of, program_for
from pipefit.planner.cuts import cut
from pipefit.planner.estimate import estimate
from pipefit.planner.lane_limits import Limit, limit_of, traffic
from pipefit.planner.search import Outcome, SearchResult
from pipefit.planner.simulated import simulated
from pipefit.planner.space import NOT_FROM_DISK, Cap, Config, Problem
from pipefit.planner.spilled_candidates import has_room, spilled_configs
from pipefit.planner.spilled_cuts import layers_of
from pipefit.schedules import find
from pipefit.schedules.registry import Schedule
from pipefit.spec import Candidate, Profile, Topology
from pipefit.spec.options import STEP_ON
from pipefit.spec.topology import Tier
from pipefit.units import format_bytes, format_seconds

_NUM_SIMULATED = 8
"""Candidates that are simulated however long their programs are."""
_MOST_INSTRUCTIONS = 50_000
"""Of all that are simulated beyond these: a second's worth."""


def problem_under_cap(
    profile: Profile,
    topology: Topology,
    cap: Cap,
    num_microbatches: int,
    microbatch_size: int | None,
    state_per_weight: float | None,
    schedule: str | None,
) -> tuple[Problem, Config]:
    """The problem, and the candidate that spills nothing, not yet cut.

    Raises:
        PlanError: a wish that has no meaning, or no such tier.
    """
    if not cap.device_bytes > 0:
        raise PlanError(f"device_bytes: expected more than 0, got {cap.device_bytes}")
    state = usual_state(profile) if state_per_weight is None else state_per_weight
    size = microbatch_size or profile.microbatch_size
    tier = _tier(topology, cap.tier)
    if cap.step_on not in STEP_ON:
        raise PlanError(f"step_on: expected one of {', '.join(STEP_ON)}, got {cap.step_on!r}")
    if cap.step_on == "host" and tier.name != "host":
        raise PlanError(f"step_on: {NOT_FROM_DISK}")
    _check_ranks(cap, topology, profile)
    order = find(schedule or ("spilled" if cap.depth == 1 else "breadth-first"))
    _check_schedule(order, cap)
    known = replace(
        cap,
        tier=tier.name,
        host_bytes=tier.capacity_bytes if cap.host_bytes is None else cap.host_bytes,
        step_on=cap.step_on if state else "device",
        num_chunks=cap.num_chunks if order.chunks else 1,
    )
    problem = Problem(profile, topology, size * num_microbatches, state, known)
    return problem, Config(order.name, cap.copies, cap.depth, 1, 1, size, num_microbatches)


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
    """The fastest that fits the cap without spilling; where none does, the fastest that spills.

    Activations wait on the tier only where nothing fits without, or as the cap says.

    Args:
        problem: with a cap.
        config: the candidate that spills nothing, not yet cut.
        schedule: of the request; None: the one of the candidate if stages are spilled, else "1f1b".

    Raises:
        InfeasibleError: nothing fits; the message says the smallest cap that works.
    """
    cap = problem.cap
    assert cap is not None
    whole = _resident(problem, config, schedule)
    if max(whole.peak_bytes) <= cap.device_bytes:
        return SearchResult(whole, (whole,), ())
    winner: Outcome | None = None
    ranked: list[Estimate] = []
    on_tier = False
    for on_tier in (False, True) if cap.activations is None else (cap.activations,):
        estimates = (estimate(problem, each) for each in spilled_configs(problem, config, on_tier))
        ranked = sorted((each for each in estimates if each.fits), key=_bound)
        winner = _fastest(problem, ranked)
        if winner is not None:
            break
    if winner is None:
        winner = _smallest(problem, config, on_tier)
        ranked = [winner.estimated]
        if max(winner.peak_bytes) > cap.device_bytes or not _fits_tier(problem, winner):
            raise InfeasibleError(_nothing_fits(problem, winner))
    limit = _limit(problem, winner.estimated)
    places = [place for place in ("device", "host", "split") if place != winner.estimated.config.family]
    others = [each for place in places for each in [e for e in ranked if e.config.family == place][:1]]
    candidates = tuple(_candidate(problem, other, limit) for other in others)
    return SearchResult(winner, (winner,), candidates, whole.step_s, limit)


def _resident(problem: Problem, config: Config, schedule: str | None) -> Outcome:
    """The fastest that fits without spilling; where none does, the fastest."""
    name = "1f1b" if schedule is None or find(schedule).spills else schedule
    found = sorted(_residents(problem, replace(config, schedule=name)), key=lambda outcome: outcome.time_s)
    assert problem.cap is not None
    return next((each for each in found if max(each.peak_bytes) <= problem.cap.device_bytes), found[0])


def _residents(problem: Problem, config: Config) -> Iterator[Outcome]:
    cap, profile = problem.cap, problem.at(config.microbatch_size, 1)
    assert cap is not None
    chunks = max(cap.num_chunks, 1) if find(config.schedule).chunks else 1
    weights = [layer.weight_bytes for layer in profile.layers]
    count = config.depth * chunks
    for partition in dict.fromkeys((minmax(profile, count), minmax(profile, count, weights))):
        for recompute in ("none", "all") if config.depth > 1 else ("none",):
            each = replace(config, chunks=chunks, recompute=recompute, layers=layers_of(partition))
            estimated = Estimate(each, cut(problem, each, set()), (), (), 0.0, True)
            yield Outcome(estimated, simulated(problem, estimated))


def _bound(estimated: Estimate) -> tuple[float, int]:
    """The lower bound; of equals first those whose copies of one stage need not wait for another's."""
    slots = estimated.config.slots
    return round(estimated.step_s, 9), -min(slots.weights, 2) - (min(slots.optim, 2) if slots.optim else 2)


def _fastest(problem: Problem, ranked: Sequence[Estimate]) -> Outcome | None:
    """The candidate with the shortest period, of equals the one with the fewest stages; None: none of those tried fits.

    Where none of the first fits by the clock, those that take least memory are tried.
    """
    found: list[Outcome] = []
    spent = 0
    for number, estimated in enumerate(ranked):
        if number >= _NUM_SIMULATED and spent > _MOST_INSTRUCTIONS:
            break
        if found and round(estimated.step_s, 9) > round(min(outcome.time_s for outcome in found), 9):
            break
        if not found and number == 2 * _NUM_SIMULATED:
            smallest = sorted(ranked, key=lambda each: max(each.peak_bytes))[:_NUM_SIMULATED]
            return next((Outcome(each, times) for each in smallest if (times := simulated(problem, each))), None)
        times = simulated(problem, estimated)
        if times is not None:
            found.append(Outcome(estimated, times))
            spent += times.num_instructions
    return min(found, key=lambda each: (round(each.time_s, 9), each.estimated.config.num_stages), default=None)


def _smallest(problem: Problem, config: Config, on_tier: bool) -> Outcome:
    """The candidate that takes least of a device: the same whatever the cap, so that the least that is named works."""
    assert problem.cap is not None
    free = replace(problem, cap=replace(problem.cap, device_bytes=math.inf, host_bytes=math.inf, keep=False))
    configs = spilled_configs(free, config, on_tier, finest=True)
    ranked = sorted((estimate(free, each) for each in configs), key=lambda each: max(each.peak_bytes))
    outcomes = (Outcome(each, times) for each in ranked[:_NUM_SIMULATED] if (times := simulated(free, each)))
    return min(outcomes, key=lambda each: (max(each.peak_bytes), each.estimated.config.num_stages))


def _fits_tier(problem: Problem, outcome: Outcome) -> bool:
    program, cost = _program_and_costs(problem, outcome.estimated)
    return has_room(problem, program, cost)


def _limit(problem: Problem, estimated: Estimate) -> Limit:
    """The limit of the rank that has the highest, by the whole program."""
    program, cost = _program_and_costs(problem, estimated)
    limits = (limit_of(traffic(program, rank, cost), problem.tier) for rank in range(len(program.ranks)))
    return max(limits, key=lambda found: found.limit_s)


def _program_and_costs(problem: Problem, estimated: Estimate) -> tuple[Program, CostModel]:
    assert estimated.partition is not None
    plan = plan_of(problem, estimated.config, estimated.partition, keeps=estimated.keeps)
    return program_for(problem, plan), costs_of(problem, estimated.config, estimated.partition)[0]


def _nothing_fits(problem: Problem, smallest: Outcome) -> str:
    """The smallest device that works, and the layer that needs it."""
    cap, profile, config = problem.cap, problem.profile, smallest.estimated.config
    assert cap is not None and cap.host_bytes is not None
    least, count = max(smallest.peak_bytes), config.num_stages
    if least <= cap.device_bytes:
        return (
            f"{profile.model} does not fit the {cap.tier}: it would keep its weights and the states of its "
            f"optimizer there, and may take {format_bytes(cap.host_bytes)}"
        )
    largest = max(profile.layers, key=lambda layer: layer.weight_bytes)
    several = cap.num_ranks > 1
    on_each, per_rank = (f" on each of {cap.num_ranks} ranks", " per rank") if several else ("", "")
    return (
        f"{profile.model} cannot be trained within {format_bytes(cap.device_bytes)} of device memory{on_each}: "
        f"the smallest cap that works is {format_bytes(least, up=True)}, with {count} stage{'s' * (count > 1)}, "
        f"one slot{per_rank} and {config.num_microbatches} micro-batches per update; its largest layer, "
        f"{largest.name}, has {format_bytes(largest.weight_bytes)} of weights, which need as much again for gradients"
    )


_PLACES = {
    "device": "steps on the device",
    "host": "steps on the host",
    "split": "steps on the host and the device",
}


def _candidate(problem: Problem, other: Estimate, winner: Limit) -> Candidate:
    """The best with steps elsewhere, and why it lost."""
    limit = other.limit
    assert limit is not None
    gain = winner.limit_s / limit.limit_s
    why = f"limit {format_seconds(limit.limit_s)} per update ({limit.binds} binds)"
    why += f", {gain:.2f} × as fast at best, but slower once simulated" if gain > 1 else ", no better"
    rate = problem.global_batch / limit.limit_s
    return Candidate(_PLACES[other.config.family], "spilled", limit.limit_s, rate, max(other.peak_bytes), why)
