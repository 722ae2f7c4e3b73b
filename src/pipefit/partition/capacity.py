"""Hydra's partitioner: shards that fit a device, cut from the profile and never by running out of memory."""

from __future__ import annotations

from pipefit.errors import InfeasibleError
from pipefit.spec import Partition, Profile
from pipefit.units import format_bytes

__all__ = ["hydra", "shard_bytes", "smallest_capacity"]


def shard_bytes(
    profile: Profile, first: int, end: int, optimizer_factor: float = 2.0, double_buffer: bool = False
) -> float:
    """What the shard of the layers first…end−1 needs on the device while its backward runs.

    Weights, as many bytes of gradients, the optimizer's state, what autograd saves, and two boundary tensors: its input
    (or the gradient of it) and its output (or that gradient). A double buffer adds the next shard's weights, optimizer
    state and input, loaded meanwhile; the largest a shard may be is not known before the cut, so its own are counted.

    Args:
        profile: figures of one micro-batch.
        first: first layer.
        end: one past the last layer.
        optimizer_factor: optimizer bytes per weight byte (2 for Adam with states of the weights' width, 0 for SGD).
        double_buffer: see above.
    """
    layers = profile.layers[first:end]
    weights = sum(layer.weight_bytes for layer in layers)
    entering = profile.cut_bytes[first - 1] if first > 0 else 0.0
    leaving = profile.cut_bytes[end - 1] if end < len(profile) else layers[-1].output_bytes
    needed = weights * (2 + optimizer_factor) + sum(layer.saved_bytes for layer in layers) + entering + leaving
    if double_buffer:
        needed += weights * (1 + optimizer_factor) + entering
    return needed


def hydra(
    profile: Profile, capacity_bytes: float, optimizer_factor: float = 2.0, double_buffer: bool = False
) -> Partition:
    """Cuts whenever the next layer would not fit (Nagrecha and Kumar, Hydra, 2021): the longest shards, from the front.

    A shard whose boundary is large may need less than a shorter one (its output is smaller), so each shard ends at the
    last layer up to which it fits, not before the first that does not.

    Raises:
        InfeasibleError: some layer fits no shard; the message says the smallest capacity that works.
    """
    counts, first = [], 0
    while first < len(profile):
        fitting = [
            end
            for end in range(first + 1, len(profile) + 1)
            if shard_bytes(profile, first, end, optimizer_factor, double_buffer) <= capacity_bytes
        ]
        if not fitting:
            _refuse(profile, first, capacity_bytes, optimizer_factor, double_buffer)
        counts.append(fitting[-1] - first)
        first = fitting[-1]
    return Partition.from_counts(counts, len(profile))
