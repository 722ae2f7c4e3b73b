"""Hydra's partitioner: shards that fit a device, computed from the profile, not by running out of memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import InfeasibleError, PlanError
from pipefit.partition.balance import Array, allowed, spans
from pipefit.spec import Partition, Profile
from pipefit.units import format_bytes

# Number of sizes of the double buffer that are tried.
_NUM_BUFFERS = 64


def hydra(
    profile: Profile, capacity_bytes: float, optimizer_factor: float = 2.0, double_buffer: bool = False
) -> Partition:
    """Starts a new shard whenever the next layer would not fit (Nagrecha and Kumar, Hydra): the longest shards first.

    `shard_bytes` gives the bytes of a shard. Boundary tensors may shrink as a shard grows, so a shard ends at the
    last layer up to which it fits and after which the rest can be split too. With a double buffer part of the device is
    reserved for the shard that is loaded while another computes; of several sizes the one with fewest shards is taken.

    Args:
        profile: figures of one micro-batch, layers in their order.
        capacity_bytes: the capacity of the device.
        optimizer_factor: optimizer bytes per weight byte (2 for Adam, 1 for momentum, 0 for plain SGD).
        double_buffer: reserve room for the weights, optimizer state and input of the largest next shard.

    Raises:
        InfeasibleError: nothing fits; the message names the smallest capacity that works.
        PlanError: the capacity is not positive.
    """
    if not capacity_bytes > 0:
        raise PlanError(f"capacity_bytes: expected more than 0, got {capacity_bytes}")
    needed, load = _needs(profile, optimizer_factor)
    found = []
    for reserve in _reserves(load, double_buffer):
        fits = needed + reserve <= capacity_bytes
        if double_buffer:
            fits &= load <= reserve
        counts = _longest(fits)
        if counts:
            found.append(counts)
    if not found:
        smallest = smallest_capacity(profile, optimizer_factor, double_buffer)
        raise InfeasibleError(
            f"{profile.model} cannot be split into shards of {format_bytes(capacity_bytes)}: "
            f"{_largest(needed, profile)}; the smallest capacity that works is {format_bytes(smallest)}"
        )
    return Partition.from_counts(min(found, key=len), len(profile))


def shard_bytes(profile: Profile, first: int, end: int, optimizer_factor: float = 2.0) -> float:
    """Bytes that the shard of the layers first…end−1 needs on the device while its backward runs.

    Weights, gradients and optimizer states of those that train, tensors saved by autograd, and two boundary
    activations: the input and the output of the shard (or their gradients in place of them).
    """
    return float(_needs(profile, optimizer_factor)[0][first, end])


def smallest_capacity(profile: Profile, optimizer_factor: float = 2.0, double_buffer: bool = False) -> float:
    """The smallest bytes of a device for which `hydra` can split this profile."""
    needed, load = _needs(profile, optimizer_factor)
    least = math.inf
    for reserve in _reserves(load, double_buffer):
        held = needed
        if double_buffer:
            held = np.where(load <= reserve, needed, np.inf)
        worst = np.zeros(len(needed))
        for first in range(len(needed) - 2, -1, -1):
            behind = first + 1
            worst[first] = np.maximum(held[first, behind:], worst[behind:]).min()
        least = min(least, float(worst[0]) + reserve)
    return least


def _needs(profile: Profile, optimizer_factor: float) -> tuple[Array, Array]:
    """Arrays [a, b] for the shard of layers a…b−1: bytes needed, and bytes loaded ahead; infinite where a ≥ b."""
    layers = profile.layers
    weights = spans([layer.weight_bytes for layer in layers])
    trained = spans([layer.wgrad_bytes for layer in layers])
    saved = spans([layer.saved_bytes for layer in layers])
    cuts = np.array([0.0, *profile.cut_bytes, layers[-1].output_bytes])
    entering = cuts[:, None]
    leaving = cuts[None, :]
    needed = weights + trained * (1 + optimizer_factor) + saved + entering + leaving
    loaded = weights + trained * optimizer_factor + entering
    return allowed(needed), allowed(loaded)


def _reserves(load: Array, double_buffer: bool) -> list[float]:
    """Sizes of the buffer to try: closer together where they are small."""
    if not double_buffer:
        return [0.0]
    # A shard holds at least one layer, and the cut in front of each shard may be any.
    low = float(np.diagonal(load, 1).min())
    high = float(load[np.isfinite(load)].max())
    shares = [step / (_NUM_BUFFERS - 1) for step in range(_NUM_BUFFERS)]
    return [low + (high - low) * share**2 for share in shares]


def _longest(fits: NDArray[np.bool_]) -> list[int]:
    """Layer counts of the longest shards from the front, each with a rest that can be split; empty: none."""
    rest_works = np.zeros(len(fits), dtype=bool)
    rest_works[-1] = True
    for first in range(len(fits) - 2, -1, -1):
        rest_works[first] = bool((fits[first] & rest_works).any())
    counts = []
    first = 0
    while first < len(fits) - 1:
        ends = np.flatnonzero(fits[first] & rest_works)
        if not len(ends):
            return []
        end = int(ends[-1])
        counts.append(end - first)
        first = end
    return counts


def _largest(needed: Array, profile: Profile) -> str:
    layers = np.diagonal(needed, 1)
    index = int(layers.argmax())
    name = profile.layers[index].name
    size = format_bytes(float(layers[index]))
    return f"layer {index} ({name}) needs {size} in isolation"
