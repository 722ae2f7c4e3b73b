"""Seconds of collective operations, by algorithm, size and the levels of the network that their members span.

Legend: d members, n bytes of the whole tensor, B bandwidth, α latency of a message.

    ring: (d−1)·(α + n/(d·B)) for a reduce-scatter or an all-gather, twice that for an all-reduce
    tree: 2·⌈log2 d⌉·α + 2·n/B for an all-reduce

The faster one counts, as NCCL chooses: the tree where latency matters, the ring where bandwidth does.
Sources: Thakur, Rabenseifner, Gropp (IJHPCA 2005) §4; Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan" (Parallel Computing 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipefit.spec.topology import Topology


class Ring(NamedTuple):
    """The members of a collective and the links between them.

    Attributes:
        size: d.
        bandwidth_bytes_per_s: of the whole ring. Members in one server leave it through a link each, so several rings
            run at the same time, unless they share one port.
        ring_s: α over one round of the ring: d − 1 messages, few of them between servers.
        tree_s: α over one way of the tree.
    """

    size: int
    bandwidth_bytes_per_s: float
    ring_s: float
    tree_s: float


def even(size: int, bandwidth_bytes_per_s: float, latency_s: float) -> Ring:
    """A ring whose links are all alike."""
    others = size - 1
    return Ring(size, bandwidth_bytes_per_s, others * latency_s, others.bit_length() * latency_s)


def ring_of(topology: Topology, members: Sequence[int]) -> Ring:
    """The ring of some devices of a topology.

    >>> from pipefit.spec import Level
    >>> two = Topology((Level("server", 4, 12e9, 1.0), Level("rack", 2, 1e9, 10.0)))
    >>> ring_of(two, range(8))
    Ring(size=8, bandwidth_bytes_per_s=4000000000.0, ring_s=16.0, tree_s=12.0)
    """
    size = len(members)
    unit = 1
    bandwidth = inf
    ring_s = 0.0
    tree_s = 0.0
    below = size
    for level in topology.levels:
        unit *= level.width
        units = len({member // unit for member in members})
        if units < below:
            # Of the messages of a round, `below − units` cross links of this level.
            ring_s += (below - units) * level.latency_s
            joined = -(-below // units)
            tree_s += (joined - 1).bit_length() * level.latency_s
            links = size // below
            if level.one_port:
                links = 1
            bandwidth = min(bandwidth, level.bandwidth_bytes_per_s * links)
        below = units
    return Ring(size, bandwidth, ring_s, tree_s)


def all_reduce_s(ring: Ring, num_bytes: float) -> float:
    """Seconds of an all-reduce; without bytes it is a barrier.

    >>> all_reduce_s(even(4, 100.0, 1.0), 1000), all_reduce_s(even(4, 100.0, 1.0), 10)
    (21.0, 4.2)
    """
    if ring.size < 2:
        return 0
    by_ring_s = all_gather_s(ring, num_bytes)
    by_tree_s = ring.tree_s + over(num_bytes, ring.bandwidth_bytes_per_s)
    return 2 * min(by_ring_s, by_tree_s)


def all_gather_s(ring: Ring, num_bytes: float) -> float:
    """Seconds of an all-gather to `num_bytes`, or of a reduce-scatter of as many."""
    whole_s = over(num_bytes, ring.bandwidth_bytes_per_s)
    return ring.ring_s + whole_s * (ring.size - 1) / ring.size


def over(num_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Seconds for some bytes; exactly 0 at infinite bandwidth, so that exact numbers stay exact."""
    if bandwidth_bytes_per_s == inf:
        return 0
    return num_bytes / bandwidth_bytes_per_s
