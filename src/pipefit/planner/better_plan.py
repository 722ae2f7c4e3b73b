"""Another cut, or other shares of the batch, by the measured times of stages.

The seconds of a stage s on a rank r are a product:

    T(s, r) = slow(r) · Σ cost(l)      l in s

From one cut only the product is known: a stage takes long because its rank is slow, or because its layers cost more
than was assumed. But layers do not change, and ranks do not change because layers move: so a surprise between two moves
is one of the rank, and one that comes with a move is one of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pipefit.cost import FREE, of_plan
from pipefit.partition.balance import divide, spans
from pipefit.planner.simulated import update_s
from pipefit.planner.space import shares_of
from pipefit.spec import Partition, Plan, Profile, Topology
from pipefit.spec.plan import Figures

Times = Mapping[tuple[int, int], float]
"""Seconds per micro-batch by rank and stage."""

_SECONDS = ("forward_s", "backward_input_s", "backward_weight_s")
_MOST = 2.0
"""Largest factor of a stage's costs that one move shows; what is beyond is a rank that has changed meanwhile."""


class Estimate(NamedTuple):
    """Costs and speeds.

    Attributes:
        profile: of the layers, on a rank whose slowness is 1.
        slowness: of each rank, the factor of the seconds of its layers.
    """

    profile: Profile
    slowness: Figures

    def step_s(self, plan: Plan, topology: Topology) -> float:
        """Simulated seconds from step to step."""
        cost = of_plan(self.profile, plan, topology, runtime=FREE)
        speed = tuple(1 / slow for slow in self.slowness)
        return update_s(plan, replace(cost, speed=speed))[1]


def estimate(plan: Plan, profile: Profile, times: Times) -> Estimate:
    """The slowness of ranks, by the times of a cut."""
    took_s = [0.0] * plan.placement.num_ranks
    costs = [0.0] * plan.placement.num_ranks
    for (rank, stage), seconds in times.items():
        layers = plan.partition.stages[stage].layers
        took_s[rank] += seconds
        costs[rank] += _cost(profile, layers)
    slowness = [seconds / cost for seconds, cost in zip(took_s, costs, strict=True)]
    return Estimate(profile, tuple(slowness))


def learned(plan: Plan, before: Estimate, times: Times) -> Profile:
    """The profile by which ranks are as slow as before a move."""
    layers = list(before.profile.layers)
    for index, (stage, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        slowness = before.slowness[ranks[0]]
        expected = slowness * _cost(before.profile, stage.layers)
        factor = times[ranks[0], index] / expected
        factor = min(max(factor, 1 / _MOST), _MOST)
        for place in stage.layers:
            changed = {name: getattr(layers[place], name) * factor for name in _SECONDS}
            layers[place] = msgspec.structs.replace(layers[place], **changed)
    return msgspec.structs.replace(before.profile, layers=tuple(layers))


def _cost(profile: Profile, layers: Sequence[int]) -> float:
    return sum(profile.layers[layer].total_s for layer in layers)


def others(plan: Plan, now: Estimate, times: Times) -> list[Plan]:
    """The plans to compare with one that runs: with the best cut, and where copies may differ with the best shares."""
    found = [_with_best_cut(plan, now)]
    if plan.data > 1 and all(stage.replicas == 1 for stage in plan.partition.stages):
        paces = []
        for copy in range(plan.data):
            each = [times[ranks[copy], stage] for stage, ranks in enumerate(plan.placement.ranks)]
            paces.append(1 / max(each))
        shared = msgspec.structs.replace(plan, shares=shares_of(paces, plan.num_microbatches))
        found += [shared, _with_best_cut(shared, now)]
    return [other for other in found if (other.partition, other.shares) != (plan.partition, plan.shares)]


def _with_best_cut(plan: Plan, now: Estimate) -> Plan:
    """The plan whose slowest stage is as fast as possible."""
    costs = spans([layer.total_s for layer in now.profile.layers])
    of_stage = []
    for ranks in plan.placement.ranks:
        shares = plan.shares or [1] * len(ranks)
        waits = [now.slowness[rank] * share for rank, share in zip(ranks, shares, strict=True)]
        of_stage.append(costs * max(waits))
    counts = divide(of_stage)
    assert counts is not None
    stages = []
    for plain, stage in zip(Partition.from_counts(counts).stages, plan.partition.stages, strict=True):
        stages.append(msgspec.structs.replace(stage, layers=plain.layers))
    partition = Partition(tuple(stages))
    return msgspec.structs.replace(plan, partition=partition, frozen=now.profile.num_frozen(partition))
