"""Where a traced forward is cut: lines through the row of its operations that little crosses.

Between two operations with weights there is one line, where the fewest bytes cross. A line is left out where less
crosses a little before it and a little after it, as inside a residual block:

    conv ─┬─ conv ─ conv ─┬─ conv         bytes at each line: 1 2 1
          └───────────────┘               the middle one is left out
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise

from torch import fx

from pipefit.cutting.flow import Flow, modules_of, num_bytes
from pipefit.cutting.own import Paths
from pipefit.errors import ModelError

MOST = 64
"""The most layers of a traced model."""

Layers = dict[fx.Node, int]
"""The layer of each operation that is computed in one layer only."""


def weighty(flow: Flow) -> list[fx.Node]:
    """The operations with weights: parameters of more than one dimension, or any if there are none."""
    matrices = [node for node in flow.parameters if node.meta["val"].dim() > 1]
    weights = set(matrices or flow.parameters)
    return [node for node in flow.computed if not weights.isdisjoint(node.all_input_nodes)]


def found_lines(flow: Flow) -> list[int]:
    """The places before which it is good to cut, in order."""
    prices = _prices(flow)
    every = [_cheapest(prices, range(a + 1, b + 1)) for a, b in pairwise(_places(flow))]
    every = [line for line in every if prices[line] < math.inf]
    reach = len(every) // 16
    lines = []
    for k, line in enumerate(every):
        before = every[max(k - reach, 0) : k]
        after = every[k + 1 : k + 1 + reach]
        is_inside = reach and _is_less(prices, before, line) and _is_less(prices, after, line)
        if not is_inside:
            lines.append(line)
    count = min(len(lines), MOST - 1)
    ends = [0]
    for part in range(1, count + 1):
        ends.append(len(lines) * part // count)
    return [_cheapest(prices, lines[a:b]) for a, b in pairwise(ends)]


def _is_less(prices: Sequence[float], others: Sequence[int], line: int) -> bool:
    """Returns whether less crosses at one of some other lines, or there are none."""
    return not others or any(prices[other] < prices[line] for other in others)


def named_lines(flow: Flow, paths: Paths) -> dict[int, str]:
    """The places before modules that are given by hand: each where the least crosses after the weights before it.

    Raises:
        ModelError: no operation with weights comes before a module, or there can be no line.
    """
    prices = _prices(flow)
    heavy = _places(flow)
    found = {}
    for path in paths:
        own = [place for place, node in enumerate(flow.nodes) if path in modules_of(node)]
        if not own:
            raise ModelError(f"cuts: {path} does not run")
        before = [place for place in heavy if place < own[0]]
        if not before:
            raise ModelError(f"cuts: {path} does not run after anything with weights")
        place = _cheapest(prices, range(before[-1] + 1, own[0] + 1))
        if prices[place] == math.inf:
            raise ModelError(f"cuts: what crosses before {path} is no tensor, or is written into on both sides")
        found[place] = path
    return dict(sorted(found.items()))


def _places(flow: Flow) -> list[int]:
    return [flow.places[node] for node in weighty(flow)]


def _cheapest(prices: Sequence[float], places: Sequence[int]) -> int:
    """The last of the places where the least crosses."""
    return min(places, key=lambda place: (prices[place], -place))


def _last_uses(flow: Flow, order: Mapping[fx.Node, int], end: int) -> Layers:
    """The number, in some order, of the last node that takes each computed one; `end` where the output has it."""
    found = {}
    for node in flow.computed:
        users = [order[user] for user in node.users if user in order]
        found[node] = max(users, default=0)
        if node in flow.outputs:
            found[node] = end
    return found


def _prices(flow: Flow) -> list[float]:
    """Bytes that cross a line before each operation; infinite where there can be none."""
    place = flow.places
    prices = [0.0] * (len(place) + 1)
    views: Counter[tuple[int, int]] = Counter()
    computed = {node: place[node] for node in flow.computed}
    for node, last in _last_uses(flow, computed, len(place)).items():
        size = num_bytes(node)
        written = flow.storages[node] & flow.writers.keys()
        for line in range(place[node] + 1, last + 1):
            prices[line] += size
            views.update((storage, line) for storage in written)
    for (storage, line), number in views.items():
        # What is written into later is copied as it arrives, which only one of its views may.
        last_writer = flow.writers[storage][-1]
        if number > 1 and line <= place[last_writer]:
            prices[line] = math.inf
    for first, last in _spans(flow, place):
        for line in range(first + 1, last + 1):
            prices[line] = math.inf
    return prices


def _spans(flow: Flow, place: Mapping[fx.Node, int]) -> Iterable[tuple[int, int]]:
    """The first and the last place that touch each memory that outlives a forward and is written into."""
    found: dict[int, tuple[int, int]] = {}
    for node in flow.computed:
        for storage in flow.touched(node) & flow.kept:
            first, _ = found.get(storage, (place[node], 0))
            found[storage] = first, place[node]
    return found.values()


def by_lines(flow: Flow, lines: Sequence[int]) -> Layers:
    """The layer of each operation between lines."""
    return {node: bisect(lines, flow.places[node]) for node in flow.computed}


def by_weights(flow: Flow, weights: Sequence[Set[str]]) -> Layers:
    """The layer of each operation, given the weights of each layer: the first in which it can be.

    Raises:
        ModelError: the operations run in another order than the layers.
    """
    known = set().union(*weights)
    layers: Layers = {}
    for node in flow.computed:
        inputs = node.all_input_nodes
        before = set(inputs).union(*map(flow.writing, [node, *inputs]))
        least = max((layers[one] for one in before if one in layers), default=0)
        names = known & flow.state_of(inputs)
        possible = [k for k in range(least, len(weights)) if names <= weights[k]]
        if not possible:
            path = (modules_of(node) or [""])[-1]
            raise ModelError(f"{path or node.name} runs in another order than in its example")
        layers[node] = possible[0]
    return layers


def crossings(flow: Flow, layers: Layers, num_layers: int) -> list[list[fx.Node]]:
    """The nodes that enter each layer, in order; none enters the first.

    Raises:
        ModelError: it is no tensor, or one that is written into in an earlier and a later layer.
    """
    lasts = _last_uses(flow, layers, num_layers - 1)
    found: list[list[fx.Node]] = [[] for _ in range(num_layers)]
    for node, layer in layers.items():
        for k in range(layer + 1, lasts[node] + 1):
            found[k].append(node)
    for k, entering in enumerate(found):
        times = Counter(storage for node in entering for storage in flow.storages[node])
        for node in entering:
            later = [s for s in flow.storages[node] if _is_written(flow, layers, s, k)]
            is_shared = any(times[s] > 1 or s in flow.kept for s in later)
            if is_shared or num_bytes(node) == math.inf:
                raise ModelError(f"{node.name} cannot be handed from one layer to the next")
    return found


def _is_written(flow: Flow, layers: Layers, storage: int, number: int) -> bool:
    """Returns whether a memory is written into in a layer or later."""
    return any(layers.get(writer, 0) >= number for writer in flow.writers.get(storage, ()))
