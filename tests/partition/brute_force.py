"""PipeDream's recurrences by enumeration: every way to divide a small graph, its cost straight from them."""

from __future__ import annotations

import math
from itertools import combinations

from pipefit.spec import Profile

# A plan of one component: a tuple of stages (layers, replicas, plan of one replica or None on a device).


def down_sets(profile: Profile, free: frozenset) -> list[frozenset]:
    layers = [i for i in range(len(profile)) if i not in free]
    found = []
    for size in range(len(layers) + 1):
        for chosen in combinations(layers, size):
            whole = free | set(chosen)
            if all(tail in whole for tail, head in profile.links if head in whole):
                found.append(frozenset(whole))
    return found


def crossing(profile: Profile, inside: frozenset) -> float:
    tails = {tail for tail, head in profile.links if tail in inside and head not in inside}
    return sum(profile.layers[tail].output_bytes for tail in tails)


def plans(profile, sets, widths, level, start, end, exact, straight):
    """All plans of the layers between two down-sets on one component of this level (0: a device)."""
    if level == 0:
        yield None
        return
    for total in [widths[level - 1]] if exact else range(1, widths[level - 1] + 1):
        yield from _sequences(profile, sets, widths, level, start, end, total, exact, straight)


def _sequences(profile, sets, widths, level, start, end, left, exact, straight):
    for cut in sets:
        if not start < cut <= end:
            continue
        for replicas in [1] if straight else range(1, left + 1):
            inner = plans(profile, sets, widths, level - 1, start, cut, exact, straight)
            if cut == end:
                if replicas == left:
                    yield from (((start, cut, replicas, plan),) for plan in inner)
                continue
            if replicas == left:
                continue
            rests = list(_sequences(profile, sets, widths, level, cut, end, left - replicas, exact, straight))
            for plan in inner:
                yield from (((start, cut, replicas, plan), *rest) for rest in rests)


def cost(profile: Profile, levels, convention: str, plan, level: int, start: frozenset, end: frozenset) -> float:
    layers = profile.layers
    if level == 0:
        loss_s = profile.loss_s if len(end) == len(layers) else 0.0
        return sum(layers[i].total_s for i in end - start) + loss_s
    bandwidth = levels[level - 1][1]
    below = levels[level - 2][0] if level > 1 else 1
    everything = frozenset(range(len(profile)))
    worst = 0.0
    for index, (low, high, m, inner) in enumerate(plan):
        compute = cost(profile, levels, convention, inner, level - 1, low, high)
        weights = sum(layers[i].weight_bytes for i in high - low)
        if convention == "paper":
            stage = max(compute, 2 * (m - 1) * weights / bandwidth) / m
        elif convention == "ring":
            stage = max(compute, 2 * (m - 1) / m * weights / bandwidth) / m
        else:
            reduction = 4 * (m - 1) * weights / (bandwidth * m)
            stage = (compute + (reduction / below if index == 0 else reduction)) / m
        worst = max(worst, stage)
        if index > 0:
            entering = 2 * crossing(profile, low) / bandwidth
            if convention == "paper":
                worst = max(worst, entering)
            elif convention == "ring":
                worst = max(worst, entering / min(m, plan[index - 1][2]))
            else:
                worst = max(worst, entering / m)
                if high != everything:
                    worst = max(worst, 2 * crossing(profile, high) / bandwidth / m)
    return worst


def flat_stages(plan, copies: int = 1) -> list[tuple[frozenset, int]]:
    found = []
    for low, high, replicas, inner in plan:
        if inner is None:
            found.append((high - low, copies * replicas))
        else:
            found += flat_stages(inner, copies * replicas)
    return found


def fits(profile: Profile, plan, limit: float, versions: float, state: float) -> bool:
    stages = flat_stages(plan)
    for index, (layers, replicas) in enumerate(stages):
        in_flight = math.ceil(sum(count for _, count in stages[index:]) / replicas)
        weights = sum(profile.layers[i].weight_bytes for i in layers)
        saved = sum(profile.layers[i].saved_bytes for i in layers)
        if in_flight * (versions * weights + saved) + state * weights > limit:
            return False
    return True


def best(profile, levels, convention, straight=False, limit=math.inf, versions=1.0, state=2.0):
    """Least time and, of the plans that reach it, the fewest stages of the outermost level."""
    free = frozenset()
    for index, layer in enumerate(profile.layers):
        costless = layer.total_s == layer.weight_bytes == layer.output_bytes == layer.saved_bytes == 0
        if costless and all(tail in free for tail, head in profile.links if head == index):
            free |= {index}
    everything = frozenset(range(len(profile)))
    if free == everything:
        free = frozenset()
    sets = down_sets(profile, free)
    widths = [width for width, _ in levels]
    exact = convention == "pipedream-code"
    found = [
        (cost(profile, levels, convention, plan, len(levels), free, everything), len(plan))
        for plan in plans(profile, sets, widths, len(levels), free, everything, exact, straight)
        if fits(profile, plan, limit, versions, state)
    ]
    if not found:
        return math.inf, 0
    least = min(time for time, _ in found)
    return least, min(count for time, count in found if time <= least * (1 + 1e-10))
