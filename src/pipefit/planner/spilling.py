"""Planning devices and a tier: where to cut a model that does not fit, how many slots, and what then binds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pipefit.cost import ModelBytes, usual_state
from pipefit.errors import InfeasibleError, PlanError
from pipefit.planner.limits import Limit, limit_of, traffic
from pipefit.planner.resident import resident
from pipefit.planner.shard_cuts import cuts_of, finest
from pipefit.planner.shards import Choice, fitting, peaks_of
from pipefit.planner.task import Task
from pipefit.schedules import find
from pipefit.schedules.registry import Schedule
from pipefit.simulate import simulate
from pipefit.spec import Candidate, Partition, Placement, Plan, Prediction, Profile, SpillSpec, Topology
from pipefit.spec.topology import Tier
from pipefit.units import format_bytes, format_seconds

__all__ = ["NOT_FROM_DISK", "STEP_ON", "plan_spilling"]

STEP_ON = ("auto", "device", "host")
"""Where the stages of a plan may be told to step."""

NOT_FROM_DISK = (
    "a step on the host works on weights, gradients and states in its memory; from a disk they would all have to be "
    "read just the same: spill to the host's memory, or step on the device"
)

_NUM_SIMULATED = 8
"""Choices that are simulated however long their programs are."""
_MOST_INSTRUCTIONS = 50_000
"""Of all that are simulated beyond these: a second's worth."""


def plan_spilling(
    profile: Profile,
    topology: Topology,
    *,
    device_bytes: float,
    num_microbatches: int = 8,
    microbatch_size: int | None = None,
    tier: str | None = None,
    host_bytes: float | None = None,
    state_per_weight: float | None = None,
    clip: bool = False,
    ties: Sequence[Sequence[int]] = (),
    activations: bool | None = None,
    step_on: str = "auto",
    num_ranks: int = 1,
    copies: int = 1,
    schedule: str | None = None,
    num_chunks: int = 0,
    keep: bool = True,
    sizes: ModelBytes | None = None,
) -> Plan:
    """How to train a model on devices that it does not fit: the cut, the slots, and the lane that binds.

    Every cut is tried with every number of slots that fits: shards as long as Hydra makes them, and shards of even
    weights. They are simulated in the order of their limits; the shortest period wins. What fits is not spilled.

    Several ranks are a pipeline, each with as many of the shards, dealt out in turn, and slots of its own. They visit a
    shard for all micro-batches at once (breadth-first), so what is moved does not grow with their number.

    Args:
        profile: seconds and bytes of the layers.
        topology: with the tiers and their rates.
        device_bytes: cap on what each device holds: slots, activations and all.
        num_microbatches: per weight update. The more there are, the more work there is for each load.
        microbatch_size: samples; None: the profile's.
        tier: "host" or "disk"; None: the first that the topology has.
        host_bytes: cap on what the tier of a machine holds; None: the tier's capacity.
        state_per_weight: optimizer bytes per weight byte: 2 for Adam, 1 for momentum, 0 for plain SGD; None: 6 for
            2-byte weights with Adam and a master copy (a profile by GPT arithmetic), else 2.
        clip: gradients are clipped by their global norm, which costs another visit of the stages that could not stay.
        ties: groups of layers that share a weight; their stages need a slot each, and come again for their step.
        activations: what enters a stage waits on the tier too, from its forward to its replay: room for more
            micro-batches, and more to move; None: only where nothing fits without.
        step_on: "device", "host", or "auto": all stages there or there, or some on the host, as is fastest by the
            tier's rates; without the rate of steps on the host it is the device.
        num_ranks: devices of all pipelines; those of one machine share its tiers.
        copies: of the pipeline, which add up their gradients.
        schedule: one that flushes; None: "spilled" for one rank, for several "breadth-first", or "1f1b" where the model
            fits.
        num_chunks: shards on each rank; 0: as many as are best.
        keep: stages that the cap leaves room for keep what a forward saved for its backward, instead of replaying it.
        sizes: what the layers take to the byte, where they are at hand; None: what the profile says.

    Raises:
        InfeasibleError: nothing fits; the message says the smallest cap that works.
        PlanError: a wish that has no meaning, or no such tier.
    """
    started = time.perf_counter()
    if not device_bytes > 0:
        raise PlanError(f"device_bytes: expected more than 0, got {device_bytes}")
    if state_per_weight is None:
        state_per_weight = usual_state(profile)
    size = microbatch_size or profile.microbatch_size
    chosen = _tier(topology, tier)
    room = chosen.capacity_bytes if host_bytes is None else host_bytes
    if step_on not in STEP_ON:
        raise PlanError(f"step_on: expected one of {', '.join(STEP_ON)}, got {step_on!r}")
    if step_on == "host" and chosen.name != "host":
        raise PlanError(f"step_on: {NOT_FROM_DISK}")
    figures = profile.at(size)
    depth = _depth(num_ranks, copies, topology, figures)
    order = find(schedule or ("spilled" if depth == 1 else "breadth-first"))
    _refuse_order(order, depth, num_chunks)
    task = Task(
        figures,
        topology,
        _tier(msgspec.structs.replace(topology, tiers=topology.tiers_among(num_ranks)), chosen.name),
        device_bytes,
        room,
        num_microbatches,
        state_per_weight,
        clip,
        tuple(map(tuple, ties)),
        bool(activations),
        step_on if state_per_weight else "device",
        num_ranks,
        order.name,
        num_chunks if order.chunks else 1,
        copies,
        keep,
        sizes,
    )
    whole = resident(task, size, schedule)
    assert whole.prediction is not None
    if max(whole.prediction.peak_bytes) <= device_bytes:
        return msgspec.structs.replace(whole, plan_seconds=time.perf_counter() - started)
    cuts = list(cuts_of(task))
    best: _Timed | None = None
    for on_tier in (False, True) if activations is None else (activations,):
        task = replace(task, activations=on_tier)
        choices = sorted(fitting(task, cuts), key=_promise)
        best = _fastest(task, choices)
        if best is not None:
            break
    if best is None:
        best = _least(task)
        choices = [best.choice]
        if max(best.peaks) > device_bytes or not task.has_room(best.choice.program, best.choice.cost):
            raise InfeasibleError(_nothing_fits(task, best))
    places = [place for place in ("device", "host", "split") if place != best.choice.steps]
    others = [choice for place in places for choice in [c for c in choices if c.steps == place][:1]]
    made = _plan_of(task, best, size, others)
    assert made.spill is not None
    told = msgspec.structs.replace(made.spill, resident_s=whole.prediction.step_s)
    return msgspec.structs.replace(made, spill=told, plan_seconds=time.perf_counter() - started)


def _depth(num_ranks: int, copies: int, topology: Topology, profile: Profile) -> int:
    """The ranks of each pipeline, if there can be so many."""
    if copies < 1 or num_ranks % copies:
        raise PlanError(f"{num_ranks} ranks cannot be {copies} copies of a pipeline; take a multiple of {copies}")
    depth = num_ranks // copies
    if num_ranks > topology.num_devices or depth > len(profile):
        raise PlanError(
            f"num_ranks: expected at most the {topology.num_devices} devices of the topology, and as many in a "
            f"pipeline as the {len(profile)} layers of the model, got {num_ranks}"
        )
    return depth


def _refuse_order(order: Schedule, depth: int, num_chunks: int) -> None:
    """Refuses a schedule that a cap has no meaning for."""
    if not order.is_synchronous:
        raise PlanError(f"{order.name} does not flush, which a cap on the device's memory needs; use breadth-first")
    if order.layout == "single" and depth > 1:
        raise PlanError(f"{order.name} is for one rank; for {depth} use breadth-first")
    if order.layout == "replicas":
        raise PlanError(f"{order.name} has one stage, with all of the model's weights; use breadth-first")
    if num_chunks > 1 and not order.chunks:
        raise PlanError(f"{order.name} has one stage per rank, got {num_chunks} chunks; use breadth-first")


def _tier(topology: Topology, name: str | None) -> Tier:
    found = [tier for tier in topology.tiers if name in (None, tier.name)]
    if not found:
        raise PlanError(
            f'the topology has no tier {name or "to spill to"!r}: add [[tiers]] with name = "{name or "host"}", '
            "capacity_bytes, read_bytes_per_s and write_bytes_per_s"
        )
    return found[0]


class _Timed(NamedTuple):
    """A choice with its whole program, simulated: its seconds, and the most on each device, which fits."""

    choice: Choice
    period_s: float
    makespan_s: float
    peaks: tuple[float, ...]


def _fastest(task: Task, choices: Sequence[Choice]) -> _Timed | None:
    """The choice with the shortest period, of equals the one with the fewest stages; None: none of those tried fits.

    They are tried in the order of what they promise, until none that is left promises more than one has reached, or it
    takes too long; only where none of the first fits, those that take least.
    """
    timed: list[_Timed] = []
    spent = 0
    for number, choice in enumerate(choices):
        if number >= _NUM_SIMULATED and spent > _MOST_INSTRUCTIONS:
            break
        if timed and round(choice.hope_s, 9) > round(min(found.period_s for found in timed), 9):
            break
        if not timed and number == 2 * _NUM_SIMULATED:
            least = sorted(choices, key=lambda choice: choice.peak_bytes)[:_NUM_SIMULATED]
            return next((found for small in least if (found := _timed(task, small))), None)
        found = _timed(task, choice)
        if found is not None:
            timed.append(found)
            spent += sum(map(len, found.choice.program.ranks))
    return min(timed, key=lambda found: (round(found.period_s, 9), len(found.choice.partition.stages)), default=None)


def _promise(choice: Choice) -> tuple[float, int]:
    """What a choice reaches at best; of equals first those whose copies of one stage need not wait for another's."""
    spill = choice.program.header.spill
    assert spill is not None
    free = min(spill.weights_slots, 2) + (min(spill.optim_slots, 2) if spill.optim_slots else 2)
    return round(choice.hope_s, 9), -free


def _timed(task: Task, choice: Choice) -> _Timed | None:
    """A choice, simulated; None: in time it takes more of a device than there is."""
    assert choice.program.header.spill is not None
    program = task.program_of(choice.partition, choice.program.header.spill, task.num_microbatches)
    once = simulate(program, choice.cost, memory=task.num_ranks > 1)
    peaks = peaks_of(program, choice.cost, once)
    if max(peaks) > task.device_bytes:
        return None
    thrice = simulate(program, choice.cost, repeats=3, memory=False)
    period_s = (thrice.makespan_s - once.makespan_s) / 2
    return _Timed(replace(choice, program=program), period_s, once.makespan_s, peaks)


def _least(task: Task) -> _Timed:
    """The choice that takes least of a device: the same whatever the cap, so that what is named as the least works."""
    anywhere = replace(task, device_bytes=math.inf, host_bytes=math.inf, keep=False)
    choices = sorted(fitting(anywhere, [*cuts_of(anywhere), finest(task)]), key=lambda choice: choice.peak_bytes)
    timed = [found for choice in choices[:_NUM_SIMULATED] if (found := _timed(anywhere, choice))]
    return min(timed, key=lambda found: (max(found.peaks), len(found.choice.partition.stages)))


def _nothing_fits(task: Task, best: _Timed) -> str:
    """What the smallest device would be, and the layer that asks for it."""
    layers, several = task.profile.layers, task.num_ranks > 1
    least, count = max(best.peaks), len(best.choice.partition.stages)
    if least <= task.device_bytes:
        return (
            f"{task.profile.model} does not fit the {task.tier.name}: it would keep its weights and the states of its "
            f"optimizer there, and may take {format_bytes(task.host_bytes)}"
        )
    largest = max(layers, key=lambda layer: layer.weight_bytes)
    on_each, per_rank = (f" on each of {task.num_ranks} ranks", " per rank") if several else ("", "")
    return (
        f"{task.profile.model} cannot be trained within {format_bytes(task.device_bytes)} of device memory{on_each}: "
        f"the smallest cap that works is {format_bytes(least, up=True)}, with {count} stage{'s' * (count > 1)}, "
        f"one slot{per_rank} and {task.num_microbatches} micro-batches per update; its largest layer, {largest.name}, "
        f"has {format_bytes(largest.weight_bytes)} of weights, which need as much again for gradients"
    )


def _plan_of(task: Task, found: _Timed, size: int, others: Sequence[Choice]) -> Plan:
    best, period_s, makespan_s, peaks = found
    num_stages, spill = len(best.partition.stages), best.program.header.spill
    assert spill is not None
    limits = [limit_of(traffic(best.program, rank, best.cost), task.tier) for rank in range(task.num_ranks)]
    limit = max(limits, key=lambda found: found.limit_s)
    told = SpillSpec(
        tier=task.tier.name,
        device_bytes=task.device_bytes,
        host_bytes=None if math.isinf(task.host_bytes) else task.host_bytes,
        weights_slots=spill.weights_slots,
        optim_slots=spill.optim_slots,
        activations=spill.activations,
        on_host=spill.on_host,
        keeps=spill.keeps,
        peak_bytes=max(peaks),
        limit_s=limit.limit_s,
        binds=limit.binds,
    )
    samples = size * task.num_microbatches
    # The schedule for one rank replays by itself.
    replays = task.schedule != "spilled"
    stages = tuple(
        msgspec.structs.replace(stage, recompute=replays and index not in spill.keeps)
        for index, stage in enumerate(best.partition.stages)
    )
    return Plan(
        Partition(stages),
        Placement(best.program.header.placement),
        task.schedule,
        task.num_microbatches,
        size,
        num_stages // task.depth,
        options=task.options,
        data=task.copies,
        spill=told,
        model=task.profile.model,
        method="spilled",
        prediction=Prediction(makespan_s, period_s, period_s, samples / period_s, peaks),
        candidates=tuple(_candidate(other, limit, samples) for other in others),
    )


def _candidate(other: Choice, chosen: Limit, samples: int) -> Candidate:
    """What the best with steps elsewhere would reach."""
    where = {"device": "steps on the device", "host": "steps on the host", "split": "steps on the host and the device"}
    limit = other.limit
    gain = chosen.limit_s / limit.limit_s
    why = f"limit {format_seconds(limit.limit_s)} per update ({limit.binds} binds)"
    why += f", {gain:.2f} × as fast at best, but slower once simulated" if gain > 1 else ", no better"
    return Candidate(where[other.steps], "spilled", limit.limit_s, samples / limit.limit_s, other.peak_bytes, why)
