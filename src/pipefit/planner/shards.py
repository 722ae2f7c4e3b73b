"""What a spilled plan can be chosen from: cuts of a model, slots, and where the shards step, as far as they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pipefit.cost import CostModel, from_profile
from pipefit.errors import InfeasibleError
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, tier_peak_bytes
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.partition.capacity import hydra
from pipefit.planner.limits import Limit, limit_of, traffic
from pipefit.schedules import Shape, generate
from pipefit.spec import Partition, Profile, Topology
from pipefit.spec.topology import Tier

__all__ = ["Choice", "Task", "cuts_of", "fitting", "resident_states"]

_SLOTS = (1, 2, 3, 4, 6, 8)
_NUM_CUTS = 12
_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Choice:
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
class Task:
    """What is to be planned: the arguments of `plan_spilling`, all known."""

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
        """What the stages of a cut cost, wherever they step."""
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
        """What would run."""
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


# ----------------------------------------------------------------------------------------------------------------- cuts


def cuts_of(task: Task) -> Iterator[Partition]:
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


def fitting(task: Task, cuts: Iterable[Partition]) -> Iterator[Choice]:
    """Every choice of slots and of places to step that device and tier have room for, of these cuts."""
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


def _choice(task: Task, partition: Partition, spill: Spill, cost: CostModel, beside: float) -> Choice | None:
    """The choice with its limit; None: device or tier have no room for it."""
    # What is moved does not depend on the number of micro-batches, unless activations are moved too.
    counted = task.num_microbatches if task.activations else 1
    small = task.program_of(partition, spill, counted)
    peak = beside + arena_bytes(small.header, 0, cost.size_bytes) + resident_states(small, cost)
    if peak > task.device_bytes or tier_peak_bytes(small, 0, cost.size_bytes)[0] > task.host_bytes:
        return None
    moved = traffic(small, 0, cost)
    moved = replace(moved, compute_s=moved.compute_s * task.num_microbatches / counted)
    return Choice(partition, spill, small, cost, peak, limit_of(moved, task.tier))


def resident_states(program: Program, cost: CostModel) -> float:
    """Bytes of the optimizer's states that stay on the device."""
    header = program.header
    return cost.resident_bytes([stage for stage in range(header.num_stages) if header.keeps_states(stage)])


def _beside_slots(task: Task, partition: Partition, cost: CostModel) -> float:
    """What the device holds beside its slots: activations at the cuts, and what one micro-batch saves."""
    num_stages = len(partition.stages)
    slots = max((2, *map(len, task.ties_of(partition))))
    spill = Spill.of(num_stages, min(slots, num_stages), 0, task.tier.name, task.activations)
    program = task.program_of(partition, spill, task.num_microbatches)
    return device_peak_bytes(program, 0, cost.size_bytes)[0] - arena_bytes(program.header, 0, cost.size_bytes)
