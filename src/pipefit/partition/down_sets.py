"""Down-sets of a graph, at which it can be split, and the costs between them.

A stage boundary is a set of layers that contains, with every layer, all layers that feed it (a down-set, written D
below). Then data only flows forward through it. Stages are the differences of an increasing sequence of down-sets. A
chain of N layers has N + 1 down-sets. A graph with wide branches has too many to list; there a block of the graph (the
part between two cuts that are comparable with every other cut) is split along the order of its layers instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipefit.ir.instruction import Indices
from pipefit.partition.balance import Array
from pipefit.spec import Profile


@dataclass(frozen=True)
class States:
    """Down-sets D_0 ⊂ … in an order in which every set comes after its subsets, as bit masks of layers.

    Attributes:
        profile: the layers.
        masks: bit i of masks[a] is set when layer i is in D_a; masks[0] holds only layers without cost.
        complete: every down-set is here, so a search over them is exact.
    """

    profile: Profile
    masks: Indices
    complete: bool

    def __len__(self) -> int:
        return len(self.masks)

    @cached_property
    def member(self) -> Array:
        """Array [state, layer] of ones and zeros."""
        num_layers = len(self.profile)
        width = (num_layers + 7) // 8
        raw = b"".join(mask.to_bytes(width, "little") for mask in self.masks)
        table = np.frombuffer(raw, np.uint8).reshape(len(self.masks), width)
        bits = np.unpackbits(table, axis=1, bitorder="little")
        return bits[:, :num_layers].astype(np.float64)

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """Array [a, b]: D_a is a proper subset of D_b, so the layers between them can be a stage."""
        outside = self.member @ (1.0 - self.member).T
        is_subset: NDArray[np.bool_] = outside == 0
        np.fill_diagonal(is_subset, False)
        return is_subset

    def between(self, field: str) -> Array:
        """Array [a, b]: the sum of a layer's figure over D_b minus D_a; infinite where D_b does not contain D_a."""
        figures = [getattr(layer, field) for layer in self.profile.layers]
        total = self.member @ np.array(figures, dtype=np.float64)
        difference = np.maximum(total[None, :] - total[:, None], 0.0)
        # Differences of sums leave rounding errors where the true value is 0.
        difference[difference < 1e-13 * total.max()] = 0.0
        return np.where(self.inside, difference, np.inf)

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes that cross the boundary at each state: every output used outside of it, counted once."""
        used_by = [0] * len(self.profile)
        for tail, head in self.profile.links:
            used_by[tail] |= 1 << head
        result = np.zeros(len(self))
        for tail, users in enumerate(used_by):
            size = self.profile.layers[tail].output_bytes
            for state, mask in enumerate(self.masks):
                if mask >> tail & 1 and users & ~mask:
                    result[state] += size
        return result

    def layers_between(self, a: int, b: int) -> Indices:
        """The layers of the stage from D_a to D_b; a stage that starts at the first state holds the free layers too."""
        mask = self.masks[b]
        if a:
            mask &= ~self.masks[a]
        return tuple(_members(mask, len(self.profile)))


def _members(mask: int, num_layers: int) -> list[int]:
    return [index for index in range(num_layers) if mask >> index & 1]


def find_states(profile: Profile, max_states: int = 2000) -> States:
    """The down-sets of a profile's graph, all of them when there are at most `max_states`.

    Sources without any cost (inputs), and layers without cost that only they feed, belong to the first stage: they are
    in every state.

    When there are more, blocks with few down-sets keep all of theirs, and the others are split along the order of their
    layers. So for a chain of any length all down-sets are found.
    """
    feeds = [0] * len(profile)
    for tail, head in profile.links:
        feeds[head] |= 1 << tail
    free = _free_layers(profile, feeds)
    blocks = _blocks(profile, free)
    listed = [_down_sets(start, end, feeds, max_states) for start, end in blocks]
    allowance = max_states
    if None in listed or sum(map(len, filter(None, listed))) > max_states:
        allowance = max(max_states // len(blocks), 8)
    complete = True
    masks = {free}
    for (start, end), sets in zip(blocks, listed, strict=True):
        if sets is None or len(sets) > allowance:
            complete = False
            sets = _along_order(start, end, feeds)
        masks.update(sets)
    by_size = sorted(masks, key=lambda mask: (mask.bit_count(), mask))
    return States(profile, tuple(by_size), complete)


def _free_layers(profile: Profile, feeds: list[int]) -> int:
    """Layers without any time and bytes that are fed only by such layers; none if these were all layers."""
    free = 0
    for index, layer in enumerate(profile.layers):
        cost = layer.total_s + layer.weight_bytes + layer.output_bytes + layer.saved_bytes
        if feeds[index] & ~free == 0 and cost == 0:
            free |= 1 << index
    if free == (1 << len(profile)) - 1:
        return 0
    return free


def _blocks(profile: Profile, free: int) -> list[tuple[int, int]]:
    """Consecutive pairs of cuts that are comparable with every down-set.

    The prefix D of the layers' order is such a cut when each layer outside of it needs all of D.
    """
    num_layers = len(profile)
    above = [0] * num_layers
    for tail, head in sorted(profile.links, key=lambda link: link[1]):
        above[head] |= above[tail] | 1 << tail
    everything = (1 << num_layers) - 1
    cuts = [everything]
    common = everything
    for index in reversed(_members(everything & ~free, num_layers)):
        common &= above[index] | free
        prefix = ((1 << index) - 1) | free
        if prefix & ~common == 0 and prefix != free:
            cuts.append(prefix)
    cuts.append(free)
    cuts.reverse()
    return list(pairwise(cuts))


def _down_sets(start: int, end: int, feeds: list[int], limit: int) -> list[int] | None:
    """All down-sets from `start` to `end` but `start` itself; None when there are more than `limit`."""
    seen = {start}
    frontier = [start]
    rest = _members(end & ~start, len(feeds))
    while frontier:
        grown = set()
        for mask in frontier:
            for index in rest:
                larger = mask | 1 << index
                if larger != mask and feeds[index] & ~mask == 0:
                    grown.add(larger)
        frontier = list(grown)
        seen |= grown
        if len(seen) > limit + 1:
            return None
    return sorted(seen - {start})


def _along_order(start: int, end: int, feeds: list[int]) -> list[int]:
    """The prefixes of a block's layers in the order of the profile that are down-sets."""
    rest = _members(end & ~start, len(feeds))
    mask = start
    found = []
    while rest:
        ready = [index for index in rest if feeds[index] & ~mask == 0]
        layer = ready[0]
        rest.remove(layer)
        mask |= 1 << layer
        found.append(mask)
    return found
