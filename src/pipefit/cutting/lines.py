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
from itertools import accumulate, pairwise

from torch import fx

from pipefit.cutting.flow import Flow, modules_of, num_bytes
from pipefit.errors import ModelError

MOST = 64
"""The most layers of a traced model."""

Layers = Mapping[fx.Node, int]
"""The layer of each operation that is computed in one layer only."""


def weighty(flow: Flow) -> list[fx.Node]:
    """The operations with weights: parameters of more than one dimension, or any if there are none."""
    matrices = {node for node in flow.parameters if node.meta["val"].dim() > 1} or set(flow.parameters)
    live = set(flow.computed)
    return [node for node in flow.nodes if node in live and not matrices.isdisjoint(node.all_input_nodes)]


def found_lines(flow: Flow) -> list[int]:
    """The places before which it is good to cut, in order."""
    prices = _prices(flow)
    lines = [_cheapest(prices, range(a + 1, b + 1)) for a, b in pairwise(_places(flow))]
    lines = [line for line in lines if prices[line] < math.inf]
    reach = len(lines) // 16

    def is_inside(k: int) -> bool:
        sides = lines[max(k - reach, 0) : k], lines[k + 1 : k + 1 + reach]
        return reach > 0 and all(not side or any(prices[other] < prices[lines[k]] for other in side) for side in sides)

    lines = [line for k, line in enumerate(lines) if not is_inside(k)]
    count = min(len(lines), MOST - 1)
    if count:
        ends = [len(lines) * part // count for part in range(count + 1)]
    else:
        ends = [0]
    return [_cheapest(prices, lines[a:b]) for a, b in pairwise(ends)]


def named_lines(flow: Flow, paths: Sequence[str]) -> dict[int, str]:
    """The places before modules that are given by hand: each where the least crosses after the weights before it.

    Raises:
        ModelError: no operation with weights comes before a module, or there can be no line.
    """
    prices, heavy = _prices(flow), _places(flow)
    found: dict[int, str] = {}
    for path in paths:
        start = next((i for i, node in enumerate(flow.nodes) if path in modules_of(node)), None)
        if start is None:
            before = []
        else:
            before = [i for i in heavy if i < start]
        if start is None or not before:
            raise ModelError(f"cuts: {path} does not run" + ("" if start is None else " after anything with weights"))
        place = _cheapest(prices, range(before[-1] + 1, start + 1))
        if prices[place] == math.inf:
            raise ModelError(f"cuts: what crosses before {path} is no tensor, or is written into on both sides")
        found[place] = path
    return dict(sorted(found.items()))


def _places(flow: Flow) -> list[int]:
    heavy = set(weighty(flow))
    return [place for place, node in enumerate(flow.nodes) if node in heavy]


def _cheapest(prices: Sequence[float], places: Sequence[int]) -> int:
    """The last of the places where the least crosses."""
    return min(places, key=lambda place: (prices[place], -place))


def _last_uses(flow: Flow, order: Mapping[fx.Node, int], end: int) -> dict[fx.Node, int]:
    """Of each computed node the largest number, in some order, of one that takes it; `end` for those of the output."""
    found = {node: max((order[user] for user in node.users if user in order), default=0) for node in flow.computed}
    return found | {node: end for node in flow.outputs if node in order}


def _prices(flow: Flow) -> list[float]:
    """Bytes that cross a line before each operation; infinite where there can be none."""
    place = {node: i for i, node in enumerate(flow.nodes)}
    changes = [0.0] * (len(place) + 2)
    closed = [False] * (len(place) + 1)
    views: Counter[tuple[int, int]] = Counter()
    for node, last in _last_uses(flow, {node: place[node] for node in flow.computed}, len(place)).items():
        first, size = place[node] + 1, num_bytes(node)
        if size == math.inf:
            closed[first : last + 1] = [True] * (last + 1 - first)
        elif first <= last:
            changes[first] += size
            changes[last + 1] -= size
        for storage in flow.storages[node] & flow.writers.keys():
            views.update((storage, line) for line in range(first, last + 1))
    for (storage, line), number in views.items():
        # What is written into later is copied as it arrives, which only one of its views may.
        if number > 1 and line <= place[flow.writers[storage][-1]]:
            closed[line] = True
    for first, last in _spans(flow, place):
        closed[first + 1 : last + 1] = [True] * (last - first)
    return [math.inf if shut else size for size, shut in zip(accumulate(changes), closed, strict=False)]


def _spans(flow: Flow, place: Mapping[fx.Node, int]) -> Iterable[tuple[int, int]]:
    """The first and the last place that touch each memory that outlives a forward and is written into."""
    found: dict[int, tuple[int, int]] = {}
    for node in flow.computed:
        for storage in flow.touched(node) & flow.kept:
            first, _ = found.get(storage, (place[node], 0))
            found[storage] = first, place[node]
    return found.values()


def by_lines(flow: Flow, lines: Sequence[int]) -> dict[fx.Node, int]:
    """The layer of each operation between lines."""
    place = {node: i for i, node in enumerate(flow.nodes)}
    return {node: bisect(lines, place[node]) for node in flow.computed}


def by_weights(flow: Flow, weights: Sequence[Set[str]]) -> dict[fx.Node, int]:
    """The layer of each operation, given the weights of each layer: the first in which it can be.

    Raises:
        ModelError: the operations run in another order than the layers.
    """
    known = set().union(*weights)
    layers: dict[fx.Node, int] = {}
    for node in flow.computed:
        before = set(node.all_input_nodes).union(*map(flow.writing, (node, *node.all_input_nodes)))
        least = max((layers[one] for one in before if one in layers), default=0)
        names = known & flow.state_of(node.all_input_nodes)
        place = next((k for k in range(least, len(weights)) if names <= weights[k]), None)
        if place is None:
            raise ModelError(f"{(modules_of(node) or [''])[-1] or node.name} runs in another order than in its example")
        layers[node] = place
    return layers


def crossings(flow: Flow, layers: Layers, num_layers: int) -> list[list[fx.Node]]:
    """The nodes that enter each layer, in order; none enters the first.

    Raises:
        ModelError: it is no tensor, or one that is written into in an earlier and a later layer.
    """
    lasts = _last_uses(flow, layers, num_layers - 1)
    found = [[node for node in layers if layers[node] < k <= lasts[node]] for k in range(num_layers)]
    for k, entering in enumerate(found):
        for node in entering:
            later = {s for s in flow.storages[node] for writer in flow.writers.get(s, ()) if layers.get(writer, 0) >= k}
            shared = any(later & flow.storages[other] for other in entering if other is not node)
            if num_bytes(node) == math.inf or shared or later & flow.kept:
                raise ModelError(f"{node.name} cannot be handed from one layer to the next")
    return found
