"""Planning one device and a tier: where to cut a model that does not fit, how many slots, and what then binds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pipefit.cost import CostModel, from_profile
from pipefit.errors import InfeasibleError, PlanError
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, tier_peak_bytes
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.partition.capacity import hydra
from pipefit.planner.gpt import usual_state
from pipefit.planner.limits import Limit, limit_of, traffic
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.spec import Candidate, Partition, Placement, Plan, Prediction, Profile, SpillSpec, Topology
from pipefit.spec.topology import Tier
from pipefit.units import format_bytes, format_seconds

__all__ = ["NOT_FROM_DISK", "STEP_ON", "plan_spilling", "spill_lines"]

STEP_ON = ("auto", "device", "host")
"""Where the stages of a plan may be told to step."""

NOT_FROM_DISK = (
    "a step on the host works on weights, gradients and states in its memory; from a disk they would all have to be "
    "read just the same: spill to the host's memory, or step on the device"
)

_SLOTS = (1, 2, 3, 4, 6, 8)
_NUM_CUTS = 12
_NUM_SIMULATED = 8
_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class _Choice:
    """A cut and its slots, that fit."""

    partition: Partition
    spill: Spill
    program: Program
    cost: CostModel
    peak_bytes: float
    limit: Limit

    @property
    def steps(self) -> str:
        """Where its stages step: "device", "host" or "split"."""
        spill = self.program.header.spill
        if spill is None or not spill.on_host:
            return "device"
        return "host" if spill.on_host == spill.stages else "split"


@dataclass(frozen=True)
class _Task:
    profile: Profile
    topology: Topology
    tier: Tier
    device_bytes: float
    host_bytes: float
    num_microbatches: int
    state: float
    clip: bool
    ties: tuple[tuple[int, ...], ...]
    activations: bool
    step_on: str
    costs: dict[str, Any]

    def cost_of(self, partition: Partition) -> CostModel:
        cost = from_profile(
            self.profile,
            partition,
            self.topology,
            optimizer_bytes_per_weight_byte=self.state,
            loss_s=self.profile.loss_s,
            **self.costs,
        )
        steps = tuple(self.profile.optimizer_of(stage.layers) for stage in partition.stages)
        rate = self.tier.step_bytes_per_s
        return replace(
            cost, step_s=steps, host_step_s=tuple(size / rate for size in cost.weight_bytes) if rate else steps
        )

    def program_of(self, partition: Partition, spill: Spill, num_microbatches: int) -> Program:
        shape = Shape(
            len(partition.stages), num_microbatches, clip=self.clip, ties=self.ties_of(partition), spill=spill
        )
        return generate("spilled", shape)

    def on_host(self, partition: Partition, optim_slots: int) -> Iterator[tuple[int, ...]]:
        """The stages that may step on the host, together; of a split the last, which step first.

        Their steps have the longest until their weights are needed again.
        """
        tied = {stage for tie in self.ties_of(partition) for stage in tie}
        free = tuple(stage for stage in range(len(partition.stages)) if stage not in tied)
        if self.step_on != "host" or not free:
            yield ()
        knows = self.tier.step_bytes_per_s > 0 and self.step_on == "auto"
        if self.tier.name != "host" or not free or not (knows or self.step_on == "host"):
            return
        num_stages = len(partition.stages)
        if len(free) < num_stages or not optim_slots:
            yield free
        if self.step_on == "auto":
            for share in _SHARES:
                count = round(share * len(free))
                if 0 < count < len(free):
                    yield free[-count:]

    def ties_of(self, partition: Partition) -> tuple[tuple[int, ...], ...]:
        """The stages that share a weight because layers of them do."""
        owner = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
        groups = {tuple(sorted({owner[layer] for layer in tie})) for tie in self.ties}
        return tuple(sorted(group for group in groups if len(group) > 1))


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
    activations: bool = False,
    step_on: str = "auto",
    costs: Mapping[str, float] | None = None,
) -> Plan:
    """How to train a model on one device that it does not fit: the cut, the slots, and the lane that binds.

    Every cut is tried with every number of slots that fits: shards as long as Hydra makes them, and shards of even
    weights. Those with the lowest limits are simulated; the shortest period wins. A model that fits is not spilled.

    Args:
        profile: seconds and bytes of the layers.
        topology: with the tiers and their rates.
        device_bytes: cap on what the device holds: slots, activations and all.
        num_microbatches: per weight update. The more there are, the more work there is for each load.
        microbatch_size: samples; None: the profile's.
        tier: "host" or "disk"; None: the first that the topology has.
        host_bytes: cap on what the tier holds; None: the tier's capacity.
        state_per_weight: optimizer bytes per weight byte: 2 for Adam, 1 for momentum, 0 for plain SGD; None: 6 for
            2-byte weights with Adam and a master copy (a profile by GPT arithmetic), else 2.
        clip: gradients are clipped by their global norm, which costs another visit of the stages that could not stay.
        ties: groups of layers that share a weight; their stages need a slot each, and come again for their step.
        activations: what enters a stage waits on the tier too, from its forward to its replay: room for more
            micro-batches, and more to move.
        step_on: "device", "host", or "auto": all stages there or there, or some on the host, as is fastest by the
            tier's rates; without the rate of steps on the host it is the device.
        costs: further costs for `pipefit.cost.from_profile`, such as input_bytes.

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
    task = _Task(
        figures,
        topology,
        chosen,
        device_bytes,
        room,
        num_microbatches,
        state_per_weight,
        clip,
        tuple(map(tuple, ties)),
        activations,
        step_on if state_per_weight else "device",
        dict(costs or {}),
    )
    whole, whole_bytes = _resident(task, size)
    assert whole.prediction is not None
    if whole_bytes <= device_bytes:
        return msgspec.structs.replace(whole, plan_seconds=time.perf_counter() - started)
    cuts = list(_cuts(task))
    choices = sorted(_fitting(task, cuts), key=lambda choice: choice.limit.limit_s)
    if not choices:
        raise InfeasibleError(_nothing_fits(task, cuts))
    best, period_s, makespan_s = _fastest(task, choices[:_NUM_SIMULATED])
    places = [place for place in ("device", "host", "split") if place != best.steps]
    others = [choice for place in places for choice in [c for c in choices if c.steps == place][:1]]
    made = _plan_of(task, best, period_s, makespan_s, size, others)
    assert made.spill is not None
    told = msgspec.structs.replace(made.spill, resident_s=whole.prediction.step_s)
    return msgspec.structs.replace(made, spill=told, plan_seconds=time.perf_counter() - started)


def _tier(topology: Topology, name: str | None) -> Tier:
    found = [tier for tier in topology.tiers if name in (None, tier.name)]
    if not found:
        raise PlanError(
            f'the topology has no tier {name or "to spill to"!r}: add [[tiers]] with name = "{name or "host"}", '
            "capacity_bytes, read_bytes_per_s and write_bytes_per_s"
        )
    return found[0]


def _resident(task: _Task, size: int) -> tuple[Plan, float]:
    """The plan of a device that holds the whole model, and how much it then holds."""
    partition = Partition.from_counts([len(task.profile)], len(task.profile))
    cost, program = task.cost_of(partition), generate("1f1b", Shape(1, task.num_microbatches, clip=task.clip))
    peak, _ = device_peak_bytes(program, 0, cost.size_bytes, cost.resident_bytes((0,)))
    step_s = simulate(program, cost, memory=False).makespan_s
    samples = size * task.num_microbatches
    plan = Plan(
        partition,
        Placement(((0,),)),
        "1f1b",
        task.num_microbatches,
        size,
        model=task.profile.model,
        method="spilled",
        prediction=Prediction(step_s, step_s, step_s, samples / step_s, (peak,)),
    )
    return plan, peak


# ----------------------------------------------------------------------------------------------------------------- cuts


def _cuts(task: _Task) -> Iterator[Partition]:
    """Cuts worth a try, the coarsest first, each once."""
    weights = [layer.weight_bytes for layer in task.profile.layers]
    num_layers = len(weights)
    counts = {round(num_layers ** (step / (_NUM_CUTS - 1))) for step in range(_NUM_CUTS)}
    found = {tuple(_even(weights, count)) for count in counts}
    for share in (0.25, 0.5, 0.75, 1.0):
        for double in (False, True):
            with suppress(InfeasibleError):
                cut = hydra(task.profile, share * task.device_bytes, task.state, double)
                found.add(tuple(len(stage.layers) for stage in cut.stages))
    for layers in sorted(found, key=lambda layers: (len(layers), layers)):
        yield Partition.from_counts(layers, num_layers)


def _even(weights: Sequence[float], count: int) -> list[int]:
    """Layer counts of at most `count` shards whose largest is as small as it can be.

    >>> _even([3, 1, 1, 1, 4], 3)
    [2, 2, 1]
    """
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(weights, middle)) <= count else (middle, high)
    return _filled(weights, high * (1 + 1e-9))


def _filled(weights: Sequence[float], limit: float) -> list[int]:
    counts, held = [0], 0.0
    for weight in weights:
        if counts[-1] and held + weight > limit:
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += weight
    return counts


# -------------------------------------------------------------------------------------------------------------- choices


def _slots(num_stages: int, state: float) -> Iterator[tuple[int, int]]:
    """Slots for weights and for states; none for states that stay on the device."""
    several = [count for count in _SLOTS if count <= num_stages]
    for weights in several:
        yield weights, 0
        yield from ((weights, optim) for optim in several[:2] if state)


def _fitting(task: _Task, cuts: Iterable[Partition]) -> Iterator[_Choice]:
    for partition in cuts:
        cost, num_stages = task.cost_of(partition), len(partition.stages)
        beside = _beside_slots(task, partition, cost)
        largest_tie = max(map(len, task.ties_of(partition)), default=1)
        for weights, optim in _slots(num_stages, task.state):
            if weights < largest_tie:
                continue
            for on_host in task.on_host(partition, optim):
                spill = Spill.of(num_stages, weights, optim, task.tier.name, task.activations)
                spill = msgspec.structs.replace(spill, on_host=on_host)
                choice = _choice(task, partition, spill, cost, beside)
                if choice is not None:
                    yield choice


def _choice(task: _Task, partition: Partition, spill: Spill, cost: CostModel, beside: float) -> _Choice | None:
    """The choice with its limit; None: device or tier have no room for it."""
    # What is moved does not depend on the number of micro-batches, unless activations are moved too.
    counted = task.num_microbatches if task.activations else 1
    small = task.program_of(partition, spill, counted)
    peak = beside + arena_bytes(small.header, 0, cost.size_bytes) + _resident_states(small, cost)
    if peak > task.device_bytes or tier_peak_bytes(small, 0, cost.size_bytes)[0] > task.host_bytes:
        return None
    moved = traffic(small, 0, cost)
    moved = replace(moved, compute_s=moved.compute_s * task.num_microbatches / counted)
    return _Choice(partition, spill, small, cost, peak, limit_of(moved, task.tier))


def _resident_states(program: Program, cost: CostModel) -> float:
    header = program.header
    return cost.resident_bytes([stage for stage in range(header.num_stages) if header.keeps_states(stage)])


def _beside_slots(task: _Task, partition: Partition, cost: CostModel) -> float:
    """What the device holds beside its slots: activations at the cuts, and what one micro-batch saves."""
    num_stages = len(partition.stages)
    slots = max((2, *map(len, task.ties_of(partition))))
    spill = Spill.of(num_stages, min(slots, num_stages), 0, task.tier.name, task.activations)
    program = task.program_of(partition, spill, task.num_microbatches)
    return device_peak_bytes(program, 0, cost.size_bytes)[0] - arena_bytes(program.header, 0, cost.size_bytes)


def _fastest(task: _Task, choices: Sequence[_Choice]) -> tuple[_Choice, float, float]:
    """The choice with the shortest period, of equals the one with the fewest stages; its period and makespan."""
    timed = []
    for choice in choices:
        assert choice.program.header.spill is not None
        program = task.program_of(choice.partition, choice.program.header.spill, task.num_microbatches)
        once, thrice = (simulate(program, choice.cost, repeats=n, memory=False).makespan_s for n in (1, 3))
        timed.append((replace(choice, program=program), (thrice - once) / 2, once))
    return min(timed, key=lambda found: (round(found[1], 9), len(found[0].partition.stages)))


def _nothing_fits(task: _Task, cuts: Sequence[Partition]) -> str:
    """What the smallest device would be, and the layer that asks for it."""
    layers = task.profile.layers
    finest = [*cuts, Partition.from_counts([1] * len(layers), len(layers))]
    least, count = min(
        (choice.peak_bytes, len(choice.partition.stages))
        for choice in _fitting(replace(task, device_bytes=math.inf, host_bytes=math.inf), finest)
    )
    if least <= task.device_bytes:
        return (
            f"{task.profile.model} does not fit the {task.tier.name}: it would keep its weights and the states of its "
            f"optimizer there, and may take {format_bytes(task.host_bytes)}"
        )
    largest = max(layers, key=lambda layer: layer.weight_bytes)
    return (
        f"{task.profile.model} cannot be trained within {format_bytes(task.device_bytes)} of device memory: the "
        f"smallest cap that works is {format_bytes(least)}, with {count} stages, one slot and {task.num_microbatches} "
        f"micro-batches per update; its largest layer, {largest.name}, has {format_bytes(largest.weight_bytes)} of "
        "weights, which need as much again for gradients"
    )


# ----------------------------------------------------------------------------------------------------------------- plan


def _plan_of(
    task: _Task,
    best: _Choice,
    period_s: float,
    makespan_s: float,
    size: int,
    others: Sequence[_Choice],
) -> Plan:
    num_stages, spill = len(best.partition.stages), best.program.header.spill
    assert spill is not None
    # Counted on the whole program, to the byte.
    peak, _ = device_peak_bytes(best.program, 0, best.cost.size_bytes, _resident_states(best.program, best.cost))
    limit = limit_of(traffic(best.program, 0, best.cost), task.tier)
    told = SpillSpec(
        tier=task.tier.name,
        device_bytes=task.device_bytes,
        host_bytes=None if math.isinf(task.host_bytes) else task.host_bytes,
        weights_slots=spill.weights_slots,
        optim_slots=spill.optim_slots,
        activations=spill.activations,
        on_host=spill.on_host,
        peak_bytes=peak,
        limit_s=limit.limit_s,
        binds=limit.binds,
    )
    samples = size * task.num_microbatches
    return Plan(
        best.partition,
        Placement(((0,),) * num_stages),
        "spilled",
        task.num_microbatches,
        size,
        num_stages,
        spill=told,
        model=task.profile.model,
        method="spilled",
        prediction=Prediction(makespan_s, period_s, period_s, samples / period_s, (peak,)),
        candidates=tuple(_candidate(other, limit, samples) for other in others),
    )


def _candidate(other: _Choice, chosen: Limit, samples: int) -> Candidate:
    """What the best with steps elsewhere would reach."""
    where = {"device": "steps on the device", "host": "steps on the host", "split": "steps on the host and the device"}
    limit = other.limit
    gain = chosen.limit_s / limit.limit_s
    why = f"limit {format_seconds(limit.limit_s)} per update ({limit.binds} binds)"
    why += f", {gain:.2f} × as fast at best, but slower once simulated" if gain > 1 else ", no better"
    return Candidate(where[other.steps], "spilled", limit.limit_s, samples / limit.limit_s, other.peak_bytes, why)


def spill_lines(plan: Plan) -> list[str]:
    """What a plan spills, in words; nothing for a plan that does not."""
    told = plan.spill
    if told is None:
        return []
    stay = "" if told.on_host else "; the optimizer's states stay on the device"
    states = f", {told.optim_slots} for states" if told.optim_slots else stay
    lines = [
        f"spilled to the {told.tier}: {len(told.stages) or len(plan.partition.stages)} stages through "
        f"{told.weights_slots} slots for weights{states}",
    ]
    lines.append(f"steps: {_steps_words(told, len(plan.partition.stages))}")
    if told.peak_bytes:
        share = told.peak_bytes / told.device_bytes
        lines.append(
            f"device memory: {format_bytes(told.peak_bytes)} of {format_bytes(told.device_bytes)} ({share:.0%})"
        )
    if told.limit_s and plan.prediction is not None:
        reached = told.limit_s / plan.prediction.period_s
        lines.append(
            f"limit: {format_seconds(told.limit_s)} per update, {told.binds} binds; {reached:.0%} of it reached"
        )
    if told.resident_s and plan.prediction is not None:
        pace = told.resident_s / plan.prediction.period_s
        lines.append(f"speed: {pace:.0%} of that of a device which holds the whole model")
    return lines


def _steps_words(told: SpillSpec, num_stages: int) -> str:
    if told.tier != "host":
        return "on the device, for a step on the host would have to read from the disk just the same"
    if not told.on_host:
        return "on the device"
    if len(told.on_host) == num_stages:
        return "on the host, where the optimizer's states stay"
    stages = ", ".join(map(str, told.on_host))
    return f"of stages {stages} on the host, where the optimizer's states stay, of the others on the device"
