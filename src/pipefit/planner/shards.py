"""What a spilled plan can be chosen from: cuts of a model, slots, and where the shards step, as far as they fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pipefit.cost import CostModel, from_profile
from pipefit.errors import InfeasibleError
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, tier_peak_bytes
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import Spill
from pipefit.partition.balance import minmax
from pipefit.partition.capacity import hydra
from pipefit.planner.limits import Limit, limit_of, traffic
from pipefit.schedules import Shape, generate
from pipefit.spec import Partition, Profile, Topology
from pipefit.spec.topology import Tier
from pipefit.timeline import Timeline

__all__ = ["Choice", "Task", "cuts_of", "finest", "fitting", "peaks_of"]

_SLOTS = (1, 2, 3, 4, 6, 8)
_NUM_CUTS = 12
_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Choice:
    """A cut and its slots, that fit.

    Attributes:
        partition: the cut.
        spill: the slots, the same on every rank.
        program: of one micro-batch, where that says all.
        cost: of its stages.
        peak_bytes: of the fullest device.
        limit: of the rank that has the highest.
        hope_s: the limit, or the computation with the bubble of its pipeline.
    """

    partition: Partition
    spill: Spill
    program: Program
    cost: CostModel
    peak_bytes: float
    limit: Limit
    hope_s: float

    @property
    def steps(self) -> str:
        """Where its stages step: "device", "host" or "split"."""
        spill = self.program.header.spill
        if spill is None or not spill.on_host:
            return "device"
        return "host" if spill.on_host == spill.stages else "split"


@dataclass(frozen=True)
class Task:
    """What is to be planned: the arguments of `plan_spilling`, all known.

    Attributes:
        tier: at the rates that each rank has of it.
        topology: with such tiers.
        schedule: by which the ranks take turns; "spilled" for one of them.
        num_chunks: stages on each rank; 0: as many as are best.
        copies: of the pipeline, which have the micro-batches in turn and add up their gradients.
        keep: whether stages that there is room for keep what a forward saved for its backward.
    """

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
    num_ranks: int = 1
    schedule: str = "spilled"
    num_chunks: int = 0
    copies: int = 1
    keep: bool = True

    @property
    def depth(self) -> int:
        """Ranks of each pipeline."""
        return self.num_ranks // self.copies

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
        return generate(self.schedule, self.shape_of(partition, spill, num_microbatches))

    def shape_of(self, partition: Partition, spill: Spill, num_microbatches: int) -> Shape:
        """The shape of that; in a pipeline, too, what is spilled replays its forwards, but for stages that keep."""
        replayed = tuple(stage for stage in range(len(partition.stages)) if stage not in spill.keeps)
        return Shape(
            self.depth,
            num_microbatches,
            len(partition.stages) // self.depth,
            replicas=(self.copies,),
            clip=self.clip,
            ties=self.ties_of(partition),
            recompute=() if self.schedule == "spilled" else replayed,
            spill=spill,
            options=self.options,
        )

    @property
    def options(self) -> dict[str, int]:
        """Of the schedule: a pipeline that visits a stage for all micro-batches at once need not replay the last."""
        return {"turn": 1} if self.schedule == "breadth-first" else {}

    @property
    def moves_once(self) -> bool:
        """Whether what is moved does not depend on the number of micro-batches."""
        return not self.activations and self.schedule in ("spilled", "breadth-first")

    def has_room(self, program: Program, cost: CostModel) -> bool:
        """Whether the tier of every machine holds what the ranks there keep on it."""
        held = [tier_peak_bytes(program, rank, cost.size_bytes)[0] for rank in range(self.num_ranks)]
        share = self.topology.tier_shares(self.num_ranks)
        return all(sum(held[first : first + share]) <= self.host_bytes for first in range(0, self.num_ranks, share))

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
    if task.num_chunks:
        counts = {task.depth * task.num_chunks}
    found = {_dealt(_even(weights, count), weights, task.depth) for count in counts}
    if task.depth > 1:
        # Stages work side by side: those that take as long.
        for count in {len(layers) for layers in found}:
            found.add(_layers_of(minmax(task.profile, count)))
    for share in (0.25, 0.5, 0.75, 1.0):
        for double in (False, True):
            with suppress(InfeasibleError):
                cut = hydra(task.profile, share * task.device_bytes, task.state, double)
                found.add(_dealt(_layers_of(cut), weights, task.depth))
    if task.num_chunks:
        found = {layers for layers in found if len(layers) == task.depth * task.num_chunks}
    for layers in sorted(found, key=lambda layers: (len(layers), layers)):
        yield Partition.from_counts(layers, num_layers)


def finest(task: Task) -> Partition:
    """The cut with the smallest stages."""
    weights = [layer.weight_bytes for layer in task.profile.layers]
    if task.num_chunks:
        return minmax(task.profile, task.depth * task.num_chunks, weights)
    return Partition.from_counts(_dealt([1] * len(weights), weights, task.depth), len(weights))


def _layers_of(partition: Partition) -> tuple[int, ...]:
    return tuple(len(stage.layers) for stage in partition.stages)


def _dealt(counts: Sequence[int], weights: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """As many shards for each rank: the heaviest are halved, or, where that cannot be, the lightest joined.

    >>> _dealt([3, 1], [1, 1, 1, 1], 4), _dealt([1, 1, 1], [2, 1, 1], 2)
    ((1, 1, 1, 1), (1, 2))
    """
    found = list(counts)
    while len(found) % num_ranks and len(weights) // num_ranks * num_ranks > len(found):
        starts = [sum(found[:index]) for index in range(len(found))]
        several = [index for index, count in enumerate(found) if count > 1]
        heaviest = max(several, key=lambda index: sum(weights[starts[index] : starts[index] + found[index]]))
        half = found[heaviest] // 2
        found[heaviest : heaviest + 1] = [half, found[heaviest] - half]
    while len(found) % num_ranks:
        ends = [sum(found[: index + 1]) for index in range(len(found))]
        joined = [sum(weights[end - found[index] : end + found[index + 1]]) for index, end in enumerate(ends[:-1])]
        lightest = joined.index(min(joined))
        found[lightest : lightest + 2] = [found[lightest] + found[lightest + 1]]
    return tuple(found)


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


def _slots(most: int, state: float) -> Iterator[tuple[int, int]]:
    """Slots for weights and for states; none for states that stay on the device."""
    several = [count for count in _SLOTS if count <= most]
    for weights in several:
        yield weights, 0
        yield from ((weights, optim) for optim in several[:2] if state)


def fitting(task: Task, cuts: Iterable[Partition]) -> Iterator[Choice]:
    """Every choice of slots and of places to step that device and tier have room for, of these cuts."""
    for partition in cuts:
        cost, num_stages = task.cost_of(partition), len(partition.stages)
        largest_tie = _largest_tie(task, partition)
        # With activations on the tier, what stays here at the turn depends on the slots.
        usual = None if task.activations else _beside_slots(task, partition, cost, max(2, largest_tie))
        for weights, optim in _slots(num_stages // task.depth, task.state):
            if weights < largest_tie:
                continue
            beside = usual or _beside_slots(task, partition, cost, weights)
            for on_host in task.on_host(partition, optim):
                spill = Spill.of(num_stages, weights, optim, task.tier.name, task.activations)
                spill = msgspec.structs.replace(spill, on_host=on_host)
                choice = _choice(task, partition, spill, cost, beside)
                if choice is not None:
                    yield choice


def _choice(task: Task, partition: Partition, spill: Spill, cost: CostModel, beside: Sequence[float]) -> Choice | None:
    """The choice with its limit; None: device or tier have no room for it."""
    counted = task.copies if task.moves_once else task.num_microbatches
    small = task.program_of(partition, spill, counted)
    peaks = [
        beside[rank] + arena_bytes(small.header, rank, cost.size_bytes) + _states_of(small, cost, rank)
        for rank in range(task.num_ranks)
    ]
    if max(peaks) > task.device_bytes or not task.has_room(small, cost):
        return None
    spill, peaks = _keeping(task, small, cost, peaks)
    if spill.keeps:
        small = task.program_of(partition, spill, counted)
    times = task.num_microbatches / counted
    moved = [traffic(small, rank, cost) for rank in range(task.num_ranks)]
    limits = [limit_of(replace(each, compute_s=each.compute_s * times), task.tier) for each in moved]
    limit = max(limits, key=lambda found: found.limit_s)
    bubble_s = (
        (task.depth - 1)
        / (len(partition.stages) * task.num_microbatches)
        * sum(each.compute_s * times for each in moved)
    )
    hope_s = max(limit.limit_s, max(each.lanes["compute"] for each in limits) + bubble_s)
    return Choice(partition, spill, small, cost, max(peaks), limit, hope_s)


def _keeping(task: Task, program: Program, cost: CostModel, peaks: list[float]) -> tuple[Spill, list[float]]:
    """Lets stages that would replay keep what was saved, as far as their device has room; and what it then has.

    First come those whose replay takes the longest for the room that it saves.
    """
    spill = program.header.spill
    assert spill is not None
    replayed = {i.stage for instructions in program.ranks for i in instructions if i.op is Op.RECOMPUTE}
    if not task.keep or not replayed:
        return spill, peaks
    peaks, kept = list(peaks), set()
    for stage in sorted(replayed, key=lambda stage: (-cost.forward_s[stage] / max(cost.saved_bytes[stage], 1), stage)):
        rank = stage % task.depth
        saved = -(-task.num_microbatches // task.copies) * cost.saved_bytes[stage]
        if peaks[rank] + saved <= task.device_bytes:
            peaks[rank] += saved
            kept.add(stage)
    keeps = spill.stages if kept == replayed else tuple(sorted(kept))
    return msgspec.structs.replace(spill, keeps=keeps), peaks


def in_flight(header: Header, cost: CostModel) -> float:
    """Bytes that a rank of a pipeline holds of what is on its way: two messages each way."""
    if len(set(header.placement)) == 1:
        return 0.0
    # What the last stage gives goes nowhere.
    return 2 * max(map(sum, zip(cost.act_bytes[:-1], cost.grad_bytes[:-1], strict=True)))


def peaks_of(program: Program, cost: CostModel, timeline: Timeline) -> tuple[float, ...]:
    """The most that each rank has on its device at once, with the optimizer's states that stay there.

    In a pipeline what is sent is held until it has arrived: two messages each way, or more by the clock.

    Args:
        program: that runs.
        cost: of its stages.
        timeline: of the program, with its memory where there are several ranks.
    """
    ranks = range(program.header.num_ranks)
    listed = [device_peak_bytes(program, rank, cost.size_bytes, _states_of(program, cost, rank))[0] for rank in ranks]
    if len(ranks) == 1:
        return tuple(listed)
    more = in_flight(program.header, cost)
    return tuple(max(amount + more, timeline.peak_bytes(rank)) for rank, amount in zip(ranks, listed, strict=True))


def _states_of(program: Program, cost: CostModel, rank: int) -> float:
    """Bytes of the optimizer's states that stay on a rank's device."""
    header = program.header
    return cost.resident_bytes([stage for stage in header.stages_of(rank) if header.keeps_states(stage)])


def _largest_tie(task: Task, partition: Partition) -> int:
    """The most stages of a rank that share one weight: their gradients meet on its device."""
    ties = [Counter(stage % task.depth for stage in tie) for tie in task.ties_of(partition)]
    return max((1, *(count for tie in ties for count in tie.values())))


def _beside_slots(task: Task, partition: Partition, cost: CostModel, slots: int) -> list[float]:
    """What each device holds beside its slots: activations at the cuts, and what one micro-batch saves."""
    num_stages = len(partition.stages)
    spill = Spill.of(num_stages, min(slots, num_stages), 0, task.tier.name, task.activations)
    program = task.program_of(partition, spill, task.num_microbatches)
    return [
        device_peak_bytes(program, rank, cost.size_bytes)[0]
        - arena_bytes(program.header, rank, cost.size_bytes)
        + in_flight(program.header, cost)
        for rank in range(task.num_ranks)
    ]
