"""One search of PipeDream's partitioner: states, levels, rules, and the costs of a stage.

Every cost is local to a stage if the cut 2a/(B·min(m_left, m_right)) is read as max(2a/(B·m_left), 2a/(B·m_right)):
the costs of a stage are its computation and reduction, its receiving and its sending, and the time per mini-batch is
the largest of all these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.partition.balance import Array
from pipefit.partition.conventions import Convention, Levels, stage_s
from pipefit.partition.down_sets import States

HELD = ("wgrad_bytes", "frozen_bytes", "saved_bytes")
"""Figures of a layer that a stage holds: weights that train, other weights, tensors saved by autograd."""


@dataclass(frozen=True)
class Memory:
    """The memory of a device, and its use by a stage.

    A stage with weights W that train, F that do not, saved bytes A and k mini-batches in flight holds
    k·(versions·W + A) + state·W + F; k is ceil(devices from the stage on / its replicas).

    Attributes:
        limit_bytes: the limit of one device; infinite: no limit.
        versions: 1.0 when every mini-batch in flight keeps the weights it used (weight stashing), 0.0 when none does.
        state: bytes of gradients and optimizer states (and of the weights, where versions is 0) per weight byte.
    """

    limit_bytes: float = math.inf
    versions: float = 1.0
    state: float = 2.0

    @property
    def is_limited(self) -> bool:
        """Returns whether there is a limit."""
        return math.isfinite(self.limit_bytes)

    def needed_bytes(self, in_flight: Any, trained_bytes: Any, frozen_bytes: Any, saved_bytes: Any) -> Any:
        """Bytes of a stage with this many mini-batches in flight; numbers or arrays."""
        each = self.versions * trained_bytes + saved_bytes
        return in_flight * each + self.state * trained_bytes + frozen_bytes


@dataclass
class CutProblem:
    """States, levels (width, bytes per second; from the inside) and rules of one search."""

    states: States
    levels: Levels
    rule: Convention
    memory: Memory = Memory()
    straight: bool = False
    bases: dict[tuple[int, int], Array] = field(default_factory=dict, repr=False)

    def replica_counts(self, components: int) -> range:
        """The possible replica counts of a stage with this many remaining components."""
        if self.straight:
            return range(1, 2)
        return range(1, components + 1)

    def totals(self, level: int) -> range:
        """The numbers of components that a partition of a level may use: all by some conventions, else at most all."""
        width = self.levels[level - 1][0]
        if self.rule.released:
            return range(width, width + 1)
        return range(1, width + 1)

    def context(self, level: int, beyond: int, components: int, replicas: int) -> int:
        """Devices behind a stage for each of its copies, rounded up, when it has `replicas` of the `components` left.

        `beyond` is the same figure for the level above. On level 0, where copies are devices, 1 + this is ceil(devices
        from the stage to the end / its replicas): its mini-batches in flight. It may be rounded up on every level,
        because ceil(x / n) = ceil(ceil(x) / n). Without a memory limit it has no effect, and is 0 so that all stages
        share one table.
        """
        if not self.memory.is_limited:
            return 0
        inner = [width for width, _ in self.levels[: level - 1]]
        size = math.prod(inner)
        behind = (components - replicas) * size + beyond
        return -(-behind // replicas)

    @cached_property
    def compute_s(self) -> Array:
        """Array [a, b]: seconds per mini-batch of the layers from state a to b on one device; infinite where none.

        A stage with the last layer includes the loss.
        """
        between = self.states.between
        total = between("forward_s") + between("backward_input_s") + between("backward_weight_s")
        total[:, -1] += self.states.profile.loss_s
        return total

    @property
    def trained_bytes(self) -> Array:
        """Array [a, b]: bytes of the weights that train."""
        return self.held_bytes[0]

    @cached_property
    def held_bytes(self) -> tuple[Array, Array, Array]:
        """Arrays [a, b]: bytes of the weights that train, of the others, and saved for the backward; 0: no stage."""
        inside = self.states.inside
        found = map(self.states.between, HELD)
        trained, frozen, saved = (np.where(inside, held, 0.0) for held in found)
        return trained, frozen, saved

    def device_s(self, beyond: NDArray[np.intp] | int, row: slice | int, columns: slice | NDArray[np.intp]) -> Array:
        """Part of `compute_s`, infinite where memory does not suffice with 1 + `beyond` mini-batches in flight.

        `beyond` may be an array (p, 1) for one row; the result is then (p, columns).
        """
        held = (array[row, columns] for array in self.held_bytes)
        needed = self.memory.needed_bytes(1 + beyond, *held)
        seconds = self.compute_s[row, columns]
        return np.where(needed <= self.memory.limit_bytes, seconds, np.inf)

    def stage_s(
        self,
        level: int,
        base: Array,
        replicas: Array | int,
        row: slice | int,
        columns: slice | NDArray[np.intp],
        first: bool,
        last: bool,
    ) -> Array:
        """Seconds per mini-batch of stages of a level: computation, reduction, receiving and sending.

        Args:
            level: counted from 1.
            base: seconds on one component, for this row and these columns.
            replicas: m, or an array (p, 1) of them for one row.
            row: state the stage starts at (all for a matrix).
            columns: states it may end at.
            first: the first stage of its level, which receives nothing.
            last: the last stage of its level, which sends nothing inside the level.
        """
        rule = self.rule
        bandwidth = self.levels[level - 1][1]
        below = 1
        if level > 1:
            below = self.levels[level - 2][0]
        trained = self.trained_bytes[row, columns]
        cost: Array = stage_s(rule, base, trained, replicas, bandwidth, below, first)
        link_s = 2 * self.states.crossing_bytes / bandwidth
        share: Array | int = 1
        if rule.divides:
            share = replicas
        if not first:
            received = link_s[row]
            if not isinstance(row, int):
                received = received[:, None]
            cost = np.maximum(cost, received / share)
        sends = not last
        if rule.released:
            # Its exceptions: sending costs the first stage nothing; the last of several sends out.
            sends = not first
        if sends:
            cost = np.maximum(cost, link_s[columns] / share)
        return cost
