"""What a spilled plan can be chosen from: of each cut the slots, and where its shards step, as far as they fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from pipefit.cost import CostModel
from pipefit.ir.liveness import arena_bytes, device_peak_bytes
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import UNDER_WAY, Spill
from pipefit.planner.limits import Limit, limit_of, traffic
from pipefit.planner.task import Task
from pipefit.simulate import FEW_SENDS
from pipefit.spec import Partition
from pipefit.timeline import Timeline

__all__ = ["Choice", "fitting", "peaks_of"]

_SLOTS = (1, 2, 3, 4, 6, 8)


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
        beside[rank] + arena_bytes(small.header, rank, cost.size_bytes) + cost.staying_bytes(small.header, rank)
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
    """Bytes that a rank holds of what is on its way: messages that it sends, and activations to the tier."""
    if header.num_stages == 1:
        return 0.0
    # What the last stage gives goes nowhere.
    acts, grads = max(cost.act_bytes[:-1]), max(map(sum, zip(cost.act_bytes[:-1], cost.grad_bytes[:-1], strict=True)))
    parks = header.spill is not None and header.spill.activations
    return (FEW_SENDS * grads if len(set(header.placement)) > 1 else 0.0) + (UNDER_WAY * acts if parks else 0.0)


def peaks_of(program: Program, cost: CostModel, timeline: Timeline) -> tuple[float, ...]:
    """The most that each rank has on its device at once, with what stays there.

    In a pipeline what is sent is held for a few messages longer, or until it has arrived by the clock.

    Args:
        program: that runs.
        cost: of its stages.
        timeline: of the program, with its memory where there are several ranks.
    """
    header = program.header
    ranks = range(header.num_ranks)
    listed = [device_peak_bytes(program, rank, cost.size_bytes, cost.staying_bytes(header, rank))[0] for rank in ranks]
    more = in_flight(header, cost)
    if len(ranks) == 1:
        return (listed[0] + more,)
    return tuple(max(amount + more, timeline.peak_bytes(rank)) for rank, amount in zip(ranks, listed, strict=True))


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
