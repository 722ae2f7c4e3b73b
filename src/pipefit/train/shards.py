"""Cutting a model into shards for a device with a cap, by the memory that spilled training really takes.

slots       W·(largest weights + largest gradients) + O·(largest optimizer states)
activations the boundary of every shard, for all micro-batches: they come shard by shard
at work     what one micro-batch of one shard saves, and the largest weight twice (its new gradient, the step)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipefit.errors import InfeasibleError
from pipefit.spec import Partition, Profile
from pipefit.units import format_bytes

__all__ = ["ShardSizes", "cut_into_shards", "spilled_bytes"]

_LEAST_SHARDS = 8


class ShardSizes(NamedTuple):
    """What a layer weighs.

    Attributes:
        weights: bytes of its parameters.
        states: bytes that the optimizer keeps for them.
        largest: bytes of its largest parameter.
    """

    weights: float
    states: float
    largest: float


def spilled_bytes(
    profile: Profile,
    sizes: Sequence[ShardSizes],
    counts: Sequence[int],
    num_microbatches: int,
    slots: int,
    optim_slots: int,
) -> float:
    """The most memory that training takes on the device, beside the process itself.

    Args:
        profile: of one micro-batch; its saved and output bytes are read.
        sizes: of each layer.
        counts: layers of each shard.
        num_microbatches: per update.
        slots: for weights; each has a twin for gradients.
        optim_slots: for the optimizer's states.
    """
    parts, start = [], 0
    for count in counts:
        parts.append(range(start, start + count))
        start += count
    weights = max(sum(sizes[index].weights for index in part) for part in parts)
    states = max(sum(sizes[index].states for index in part) for part in parts)
    layers = profile.layers
    saved = max(sum(layers[index].saved_bytes for index in part) for part in parts)
    boundaries = [layers[part[-1]].output_bytes for part in parts]
    # All shards' inputs wait for their backwards; at the turn the output lives for one micro-batch, with its gradient.
    kept = sum(boundaries[:-1]) * num_microbatches + max(boundaries[:-1], default=0.0) * num_microbatches
    turn = 3 * boundaries[-1]
    work = 2 * max(size.largest for size in sizes)
    return slots * 2 * weights + optim_slots * states + kept + turn + saved + work


def cut_into_shards(
    profile: Profile,
    sizes: Sequence[ShardSizes],
    cap_bytes: float,
    num_microbatches: int,
    slots: int,
    optim_slots: int,
) -> Partition:
    """The fewest even shards that fit under a cap (but several for each slot, so that loads are hidden).

    Raises:
        InfeasibleError: none fit; the message says the smallest cap that works.
    """
    least = None
    num_layers = len(profile)
    for count in range(min(_LEAST_SHARDS, num_layers), num_layers + 1):
        counts = _even([size.weights + size.states for size in sizes], count)
        needed = spilled_bytes(profile, sizes, counts, num_microbatches, slots, optim_slots)
        if needed <= cap_bytes:
            return Partition.from_counts(counts, num_layers)
        if least is None or needed < least[0]:
            least = (needed, counts)
    assert least is not None
    needed, _ = least
    heaviest = max(range(num_layers), key=lambda index: sizes[index].weights)
    raise InfeasibleError(
        f"{profile.model or 'the model'} cannot be trained under {format_bytes(cap_bytes)}: its largest layer "
        f"({profile.layers[heaviest].name}, {format_bytes(sizes[heaviest].weights)} of weights) with {slots} slots for "
        f"weights and gradients, {optim_slots} for the optimizer, and the activations of {num_microbatches} "
        f"micro-batches needs more; the smallest cap that works is {_rounded_up(needed)}"
    )


def _rounded_up(num_bytes: float) -> str:
    """A cap that is enough, in whole MiB."""
    return f"{-int(-num_bytes // 2**20)} MiB"


def _even(weights: Sequence[float], count: int) -> list[int]:
    """Layers of each of some consecutive parts, the heaviest as light as can be."""
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        if len(_greedy(weights, middle)) <= count:
            high = middle
        else:
            low = middle
    counts = _greedy(weights, high)
    while len(counts) < count:
        largest = max(range(len(counts)), key=lambda part: counts[part])
        counts[largest : largest + 1] = [counts[largest] - counts[largest] // 2, counts[largest] // 2]
    return counts


def _greedy(weights: Sequence[float], limit: float) -> list[int]:
    counts, held = [0], 0.0
    for weight in weights:
        if counts[-1] and held + weight > limit * (1 + 1e-9):
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += weight
    return counts
