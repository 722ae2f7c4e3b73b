"""Candidates that spill: slots and places of the steps for each cut; their memory, and the lane that binds.

A model is split into equally many stages for each rank, even by weights, or by Hydra's rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, product
from operator import add

from msgspec import structs

from pipefit.cost import CostModel
from pipefit.errors import InfeasibleError
from pipefit.ir.graph import FEW_SENDS
from pipefit.ir.instruction import Groups, Indices
from pipefit.ir.liveness import arena_bytes, device_peak_bytes, tier_peak_bytes
from pipefit.ir.program import Program
from pipefit.ir.spill import UNDER_WAY
from pipefit.partition.balance import divide, minmax, spans
from pipefit.partition.capacity import hydra
from pipefit.planner.candidate import Estimate, costs_of, plan_of, program_for
from pipefit.planner.cuts import cut
from pipefit.planner.lane_limits import limit_of
from pipefit.planner.space import Config, Problem
from pipefit.spec import Partition, SpillSpec

_NUM_CUTS = 12

_SLOTS = (1, 2, 3, 4, 6, 8)

_SHARES = (0.25, 0.5, 0.75)
"""Fractions of the stages that step on the host while the others step on the device."""


def spilled_configs(problem: Problem, resident: Config, activations: bool, finest: bool = False) -> Iterator[Config]:
    """Every choice of cut, slots and places to step.

    Args:
        problem: with a cap.
        resident: a candidate that spills nothing, to which slots are added.
        activations: whether inputs of stages wait on the tier.
        finest: also the cut with the smallest stages.
    """
    cap = problem.capped
    assert cap.tier is not None
    # The capacity of the tier is not checked here.
    room = SpillSpec(cap.tier, cap.device_bytes, activations=activations)
    for partition in spilled_cuts(problem, resident.microbatch_size, finest):
        cutted = replace(resident, chunks=len(partition.stages) // cap.depth, layers=layers_of(partition))
        for weights, optim in _slots(cutted.chunks, problem.state):
            if weights >= _largest_tie(problem, partition):
                for on_host in _on_host(problem, partition, optim):
                    spill = structs.replace(room, weights_slots=weights, optim_slots=optim, on_host=on_host)
                    yield replace(cutted, spill=spill)


def _slots(most: int, state: float) -> Iterator[tuple[int, int]]:
    """Slots for weights and for states; none for states that stay on the device."""
    several = [count for count in _SLOTS if count <= most]
    for weights in several:
        yield weights, 0
        yield from ((weights, optim) for optim in several[:2] if state)


def _on_host(problem: Problem, partition: Partition, optim_slots: int) -> Iterator[Indices]:
    """The sets of stages that may step on the host; of a part of them the last stages, which step first.

    Their steps have the longest time until their weights are needed again.
    """
    cap = problem.capped
    tier = problem.tier
    num_stages = len(partition.stages)
    tied = {stage for tie in cap.ties_of(partition) for stage in tie}
    free = tuple(stage for stage in range(num_stages) if stage not in tied)
    if cap.step_on != "host" or not free:
        yield ()
    may_step = cap.step_on == "host" or (cap.step_on == "auto" and tier.step_bytes_per_s > 0)
    if tier.name != "host" or not free or not may_step:
        return
    if len(free) < num_stages or not optim_slots:
        yield free
    if cap.step_on == "auto":
        for share in _SHARES:
            count = round(share * len(free))
            if 0 < count < len(free):
                yield free[-count:]


def _largest_tie(problem: Problem, partition: Partition) -> int:
    """Maximum number of a rank's stages that share one weight: their gradients are on its device together."""
    cap = problem.capped
    most = 1
    for tie in cap.ties_of(partition):
        counts = Counter(stage % cap.depth for stage in tie)
        most = max(most, *counts.values())
    return most


def estimate_spilled(problem: Problem, config: Config) -> Estimate:
    """Counts time and memory of a candidate that spills.

    Its time is the limit of its lanes, or the computation with the bubble of its pipeline: a lower bound.
    """
    cap = problem.capped
    spill = config.spill
    partition = cut(problem, config, set())
    assert spill is not None and partition is not None
    _, cost = costs_of(problem, config, partition)
    counted = config.num_microbatches
    if not spill.activations and config.schedule in ("spilled", "breadth-first"):
        # The copies do not depend on the number of micro-batches: one micro-batch of each pipeline suffices.
        counted = config.data

    def program_of(config: Config) -> Program:
        plan = plan_of(problem, config, partition)
        return program_for(problem, structs.replace(plan, num_microbatches=counted))

    program = program_of(config)
    peaks = peaks_of(program, cost, _beside_slots(problem, config, spill, partition, cost))
    if max(peaks) > cap.device_bytes or not has_room(problem, program, cost):
        return Estimate(config, partition, tuple(peaks))
    keeps = _keeping(problem, config, program, cost, peaks)
    if keeps:
        config = replace(config, spill=structs.replace(spill, keeps=keeps))
        program = program_of(config)
    times = config.num_microbatches / counted
    lanes = [limit_of(program, rank, cost, problem.tier, times) for rank in range(cap.num_ranks)]
    limit = max(lanes, key=lambda found: found.limit_s)
    work_s = sum(each.compute_s for each in lanes)
    bubble_s = (config.depth - 1) / (config.num_stages * config.num_microbatches) * work_s
    compute_s = max(each.lanes["compute"] for each in lanes)
    step_s = max(limit.limit_s, compute_s + bubble_s)
    overflow = max(peaks) / cap.device_bytes
    return Estimate(config, partition, tuple(peaks), overflow, step_s, step_s, limit=limit)


def _keeping(problem: Problem, config: Config, program: Program, cost: CostModel, peaks: list[float]) -> Indices:
    """Stages that keep their saved tensors instead of replaying, as many as fit; adds these bytes to `peaks`.

    Stages with the longest replay per saved byte come first.
    """
    cap = problem.capped
    replayed = {stage for stage, _ in program.recomputed}
    if not cap.keep or not replayed:
        return ()

    def worth(stage: int) -> float:
        return cost.forward_s[stage] / max(cost.saved_bytes[stage], 1)

    kept = set()
    for stage in sorted(replayed, key=lambda stage: (-worth(stage), stage)):
        rank = stage % config.depth
        saved = config.per_pipeline * cost.saved_bytes[stage]
        if peaks[rank] + saved <= cap.device_bytes:
            peaks[rank] += saved
            kept.add(stage)
    if kept == replayed:
        return tuple(range(config.num_stages))
    return tuple(sorted(kept))


def _beside_slots(
    problem: Problem, config: Config, spill: SpillSpec, partition: Partition, cost: CostModel
) -> Sequence[float]:
    """Bytes of each device in addition to its slots: activations at the cuts, and saved tensors of one micro-batch."""
    weights = spill.weights_slots
    if not spill.activations:
        weights = max(2, _largest_tie(problem, partition))
    weights = min(weights, config.num_stages)
    least = structs.replace(spill, weights_slots=weights, optim_slots=0, on_host=())
    plan = plan_of(problem, replace(config, spill=least), partition)
    key = ("besides slots", config.layers, least)
    return problem.once(key, lambda: _beside_arena(program_for(problem, plan), cost))


def _beside_arena(program: Program, cost: CostModel) -> list[float]:
    """Peak bytes of each device in addition to its slots; sent values are held for a few messages longer.

    Where the work of instructions is known, the lifetimes say how long.
    """
    header = program.header
    size = cost.size_bytes
    more = 0.0
    # The output of the last stage is not sent.
    acts = cost.act_bytes[:-1]
    grads = cost.grad_bytes[:-1]
    if len(set(header.placement)) > 1 and not cost.work_bytes:
        more += FEW_SENDS * max(map(add, acts, grads))
    if acts and header.spill is not None and header.spill.activations:
        more += UNDER_WAY * max(acts)
    found = []
    for rank in range(header.num_ranks):
        peak, _ = device_peak_bytes(program, rank, size, lives=cost.lifetimes(program, rank))
        found.append(peak - arena_bytes(header, rank, size) + more)
    return found


def peaks_of(program: Program, cost: CostModel, others: Sequence[float] | None = None) -> list[float]:
    """Peak bytes of each rank's device: its slots, resident tensors, and all other values.

    Args:
        program: that runs.
        cost: of its stages.
        others: bytes of the other values; None: those of the program.
    """
    header = program.header
    found = []
    for rank, other in enumerate(others or _beside_arena(program, cost)):
        slots = arena_bytes(header, rank, cost.size_bytes)
        found.append(other + slots + cost.staying_bytes(header, rank))
    return found


def has_room(problem: Problem, program: Program, cost: CostModel) -> bool:
    """Returns whether the tier of every machine has room for the records of its ranks."""
    cap = problem.capped
    assert cap.host_bytes is not None
    held = []
    for rank in range(cap.num_ranks):
        peak, _ = tier_peak_bytes(program, rank, cost.size_bytes)
        held.append(peak)
    share = problem.topology.tier_shares(cap.num_ranks)
    for first in range(0, cap.num_ranks, share):
        machine = held[first : first + share]
        if sum(machine) > cap.host_bytes:
            return False
    return True


# -------------------------------------------------------------------------------- cuts of the model


def spilled_cuts(problem: Problem, microbatch_size: int, finest: bool = False) -> Iterator[Partition]:
    """Cuts to try, the coarsest first, each once.

    Args:
        problem: with a cap.
        microbatch_size: that the times are for.
        finest: at the end also the one with the smallest stages.
    """
    cap = problem.capped
    profile = problem.at(microbatch_size, 1)
    weights = [layer.weight_bytes for layer in profile.layers]
    num_layers = len(weights)
    depth = cap.depth
    num_stages = depth * cap.num_chunks
    shares = [step / (_NUM_CUTS - 1) for step in range(_NUM_CUTS)]
    counts = {round(num_layers**share) for share in shares}
    if num_stages:
        counts = {num_stages}
    found = {_dealt(_even(weights, count), weights, depth) for count in counts}
    if depth > 1:
        # Stages work at the same time, so they should take equally long.
        for count in set(map(len, found)):
            found.add(_counts_of(minmax(profile, count)))
    for share, double in product((0.25, 0.5, 0.75, 1.0), (False, True)):
        with suppress(InfeasibleError):
            cut = hydra(profile, share * cap.device_bytes, problem.state, double)
            found.add(_dealt(_counts_of(cut), weights, depth))
    if num_stages:
        found = {layers for layers in found if len(layers) == num_stages}
    for layers in sorted(found, key=lambda layers: (len(layers), layers)):
        yield Partition.from_counts(layers, num_layers)
    if finest and num_stages:
        yield minmax(profile, num_stages, weights)
    elif finest:
        yield Partition.from_counts(_dealt([1] * num_layers, weights, depth), num_layers)


def layers_of(partition: Partition) -> Groups:
    """The layers of each stage."""
    return tuple(stage.layers for stage in partition.stages)


def _counts_of(partition: Partition) -> Indices:
    return tuple(len(stage.layers) for stage in partition.stages)


def _dealt(counts: Sequence[int], weights: Sequence[float], num_ranks: int) -> Indices:
    """Equally many stages for each rank: the heaviest are halved, or, where this is impossible, the lightest merged.

    >>> _dealt([3, 1], [1, 1, 1, 1], 4), _dealt([1, 1, 1], [2, 1, 1], 2)
    ((1, 1, 1, 1), (1, 2))
    """
    found = list(counts)
    most = len(weights) // num_ranks * num_ranks
    while len(found) % num_ranks and len(found) < most:
        held = _weights_of(found, weights)
        several = [index for index, count in enumerate(found) if count > 1]
        heaviest = max(several, key=held.__getitem__)
        half = found[heaviest] // 2
        found[heaviest : heaviest + 1] = [half, found[heaviest] - half]
    while len(found) % num_ranks:
        sums = [a + b for a, b in pairwise(_weights_of(found, weights))]
        lightest = sums.index(min(sums))
        joined = sum(found[lightest : lightest + 2])
        found[lightest : lightest + 2] = [joined]
    return tuple(found)


def _weights_of(counts: Sequence[int], weights: Sequence[float]) -> list[float]:
    """The weights of stages of so many layers."""
    ends = accumulate(counts, initial=0)
    return [sum(weights[start:end]) for start, end in pairwise(ends)]


def _even(weights: Sequence[float], count: int) -> list[int]:
    """Layer counts of at most `count` stages whose largest is as small as possible.

    >>> _even([3, 1, 1, 1, 4], 3)
    [2, 2, 1]
    """
    cost = spans(weights)
    counts = divide([cost] * min(count, len(weights))) or []
    places = pairwise(accumulate(counts, initial=0))
    largest = max(float(cost[place]) for place in places)
    return _filled(weights, largest * (1 + 1e-9))


def _filled(weights: Sequence[float], limit: float) -> list[int]:
    counts = [0]
    held = 0.0
    for weight in weights:
        if counts[-1] and held + weight > limit:
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += weight
    return counts
