"""Choice of the compared strategies: data parallelism, the best straight pipeline, the best hybrid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.network.spec import Planned
from pipefit.partition import pipedream
from pipefit.partition.conventions import CONVENTIONS, stage_s
from pipefit.schedules import placement_of
from pipefit.spec import Partition, Placement, Plan, Profile, StageSpec, Topology

_CONVENTIONS = ("ring", "pipedream-code", "paper")


@dataclass(frozen=True)
class Choice:
    """One strategy.

    Attributes:
        strategy: in words.
        schedule: of pipefit, or "ddp".
        partition: stages with their replicas.
        minibatches: per update (of the first stage, where stages step independently).
        against: mini-batches per update of the data parallelism that it is compared with.
    """

    strategy: str
    schedule: str
    partition: Partition
    minibatches: int
    against: int

    @property
    def configuration(self) -> str:
        """Replicas per stage as the papers write them."""
        return "-".join(str(stage.replicas) for stage in self.partition.stages)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.strategy} {self.configuration}, {self.schedule}, {self.minibatches} per update"


def planned(profile: Profile, topology: Topology) -> tuple[Planned, ...]:
    """The answers of PipeDream's partitioner, by convention of cost."""
    found = []
    for cost in _CONVENTIONS:
        result = pipedream(profile, topology, cost=cost)
        assert result.partition is not None  # no memory limit: something always fits
        layers = tuple(len(stage.layers) for stage in result.partition.stages)
        found.append(
            Planned(cost, result.configuration, layers, result.time_s, result.data_parallel_s, result.straight_s)
        )
    return tuple(found)


def choices(profile: Profile, topology: Topology) -> list[Choice]:
    """The strategies in two groups, each with its own data parallelism to compare with.

    In the first, as the paper has it, a device gives its gradients after every mini-batch. In the second an update
    takes several per device, the least number that divides evenly over the replicas of every strategy.
    """
    num = topology.num_devices
    whole = Partition((StageSpec(tuple(range(len(profile))), num),))
    straight = best_of_form(profile, topology, (1,) * num)
    pipes = [("straight", straight)]
    if num > 2:
        pipes.append(("hybrid", _hybrid(profile, topology)))
    most = math.lcm(num, *(stage.replicas for _, partition in pipes for stage in partition.stages))
    batch = most * -(-2 * num // most)
    found = [
        Choice("data parallel (torch)", "ddp", whole, num, num),
        Choice("data parallel", "data-parallel", whole, num, num),
    ]
    found += [Choice(name, "pipedream", part, part.stages[0].replicas, num) for name, part in pipes]
    found += [Choice("data parallel (torch)", "ddp", whole, batch, batch)]
    found += [Choice(name, "1f1b", part, batch, batch) for name, part in pipes]
    return found


def _hybrid(profile: Profile, topology: Topology) -> Partition:
    """The partitioner's answer where it is a hybrid on all devices, else the best of the paper's form "15-1"."""
    num, answer = topology.num_devices, pipedream(profile, topology).partition
    counts = [stage.replicas for stage in answer.stages] if answer else []
    if answer and len(counts) > 1 and max(counts) > 1 and sum(counts) == num:
        return answer
    return best_of_form(profile, topology, (num - 1, 1))


def best_of_form(profile: Profile, topology: Topology, replicas: Sequence[int]) -> Partition:
    """The best cuts into stages of so many replicas each, under the partitioner's usual convention of cost.

    Args:
        profile: of a chain.
        topology: of one level.
        replicas: of each stage; at most as many stages as layers.
    """
    rule, bandwidth = CONVENTIONS["ring"], topology.levels[0].bandwidth_bytes_per_s
    layers = profile.layers

    def stage(start: int, end: int, copies: int) -> float:
        part = layers[start:end]
        seconds, weights = sum(layer.total_s for layer in part), sum(layer.weight_bytes for layer in part)
        return float(stage_s(rule, seconds, weights, copies, bandwidth, 1, first=start == 0))

    def cut(end: int, left: int, right: int) -> float:
        return 2 * layers[end - 1].output_bytes / (bandwidth * min(left, right))

    # best[end]: the slowest stage or cut of the layers before `end`, and where the stages end.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {end: (stage(0, end, replicas[0]), (end,)) for end in range(1, len(layers) + 1)}
    for left, right in pairwise(replicas):
        best = {
            end: min(
                (max(before, cut(start, left, right), stage(start, end, right)), (*ends, end))
                for start, (before, ends) in best.items()
                if start < end
            )
            for end in list(best)[1:]
        }
    ends = (0, *best[len(layers)][1])
    return Partition(
        tuple(
            StageSpec(tuple(range(start, end)), copies)
            for (start, end), copies in zip(pairwise(ends), replicas, strict=True)
        )
    )


def plan_for(choice: Choice, num_ranks: int, microbatch: int) -> Plan:
    """The plan of a strategy of pipefit."""
    counts = tuple(stage.replicas for stage in choice.partition.stages)
    layout = "replicas" if choice.schedule == "data-parallel" else "loop"
    depth = num_ranks if layout == "replicas" else len(counts)
    return Plan(
        choice.partition,
        Placement(placement_of(depth, 1, layout, () if layout == "replicas" else counts)),
        choice.schedule,
        1 if choice.schedule == "pipedream" else choice.minibatches,
        microbatch_size=microbatch,
    )
