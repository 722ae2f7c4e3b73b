"""Where a model may be cut into stages that are spilled: as many for each rank, even by weights, or as Hydra cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from pipefit.errors import InfeasibleError
from pipefit.partition.balance import divide, minmax, spans
from pipefit.partition.capacity import hydra
from pipefit.planner.space import Problem
from pipefit.spec import Partition

_NUM_CUTS = 12


def spilled_cuts(problem: Problem, microbatch_size: int, finest: bool = False) -> Iterator[Partition]:
    """Cuts worth a try, the coarsest first, each once.

    Args:
        problem: with a cap.
        microbatch_size: that the times are for.
        finest: at the end also the one with the smallest stages.
    """
    cap, profile = problem.capped, problem.at(microbatch_size, 1)
    weights = [layer.weight_bytes for layer in profile.layers]
    num_layers = len(weights)
    counts = {round(num_layers ** (step / (_NUM_CUTS - 1))) for step in range(_NUM_CUTS)}
    if cap.num_chunks:
        counts = {cap.depth * cap.num_chunks}
    found = {_dealt(_even(weights, count), weights, cap.depth) for count in counts}
    if cap.depth > 1:
        # Stages work at the same time: those that take as long.
        for count in {len(layers) for layers in found}:
            found.add(_counts_of(minmax(profile, count)))
    for share in (0.25, 0.5, 0.75, 1.0):
        for double in (False, True):
            with suppress(InfeasibleError):
                cut = hydra(profile, share * cap.device_bytes, problem.state, double)
                found.add(_dealt(_counts_of(cut), weights, cap.depth))
    if cap.num_chunks:
        found = {layers for layers in found if len(layers) == cap.depth * cap.num_chunks}
    for layers in sorted(found, key=lambda layers: (len(layers), layers)):
        yield Partition.from_counts(layers, num_layers)
    if finest and cap.num_chunks:
        yield minmax(profile, cap.depth * cap.num_chunks, weights)
    elif finest:
        yield Partition.from_counts(_dealt([1] * num_layers, weights, cap.depth), num_layers)


def layers_of(partition: Partition) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage."""
    return tuple(stage.layers for stage in partition.stages)


def _counts_of(partition: Partition) -> tuple[int, ...]:
    return tuple(len(stage.layers) for stage in partition.stages)


def _dealt(counts: Sequence[int], weights: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """As many stages for each rank: the heaviest are halved, or, where that cannot be, the lightest joined.

    >>> _dealt([3, 1], [1, 1, 1, 1], 4), _dealt([1, 1, 1], [2, 1, 1], 2)
    ((1, 1, 1, 1), (1, 2))
    """
    found = list(counts)
    while len(found) % num_ranks and len(weights) // num_ranks * num_ranks > len(found):
        starts = [sum(found[:index]) for index in range(len(found))]
        several = [index for index, count in enumerate(found) if count > 1]
        heaviest = max(several, key=lambda index: sum(weights[starts[index] : starts[index] + found[index]]))
        half = found[heaviest] // 2
        found[heaviest : heaviest + 1] = [half, found[heaviest] - half]
    while len(found) % num_ranks:
        ends = [sum(found[: index + 1]) for index in range(len(found))]
        joined = [sum(weights[end - found[index] : end + found[index + 1]]) for index, end in enumerate(ends[:-1])]
        lightest = joined.index(min(joined))
        found[lightest : lightest + 2] = [found[lightest] + found[lightest + 1]]
    return tuple(found)


def _even(weights: Sequence[float], count: int) -> list[int]:
    """Layer counts of at most `count` stages whose largest is as small as it can be.

    >>> _even([3, 1, 1, 1, 4], 3)
    [2, 2, 1]
    """
    cost = spans(weights)
    counts = divide([cost] * min(count, len(weights))) or []
    ends = list(accumulate(counts, initial=0))
    return _filled(weights, max(float(cost[a, b]) for a, b in pairwise(ends)) * (1 + 1e-9))


def _filled(weights: Sequence[float], limit: float) -> list[int]:
    counts, held = [0], 0.0
    for weight in weights:
        if counts[-1] and held + weight > limit:
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += weight
    return counts
