"""Profiles from files: pipefit's own format, and the layer graphs published with PipeDream (Harlap et al., SOSP 2019).

A published graph is JSON with `nodes` (id, desc, forward_ms, backward_ms, activation_bytes, parameter_bytes) and
`edges` (pairs of ids). Some of them are part of the package, such as `load_profile("vgg16")`; `published_names` lists
all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec

from pipefit.errors import ProfileError, nearest
from pipefit.spec.files import JsonObject, as_mistakes, decode, read_json
from pipefit.spec.profile import Layer, Profile, check_finite

_FOLDER = Path(__file__).resolve().parent.parent / "profiles_published"


class _Node(msgspec.Struct, frozen=True):
    id: str
    desc: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float


class _Graph(msgspec.Struct, frozen=True):
    model: str
    nodes: tuple[_Node, ...]
    edges: tuple[tuple[str, str], ...]
    batch_size: int = 1
    source: str = ""


def published_names() -> tuple[str, ...]:
    """The names of the profiles that come with the package.

    >>> published_names()
    ('alexnet', 'gnmt', 'gnmt_large', 'inception_v3', 'resnet50', 'vgg16')
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_profile(path: str | Path) -> Profile:
    """Reads a profile: a file in pipefit's format, a published layer graph, or the name of one in the package.

    >>> profile = load_profile("vgg16")
    >>> len(profile), profile.microbatch_size
    (41, 128)

    Raises:
        ProfileError: no such file or name, or a mistake in the file, with the path inside it.
    """
    if str(path) in published_names() and not Path(path).is_file():
        path = _FOLDER / f"{path}.json"
    elif not Path(path).exists() and Path(path).suffix == "" and len(Path(path).parts) == 1:
        raise ProfileError(f"{path}: no such file, and no published profile: {nearest(str(path), published_names())}")
    data = read_json(path, ProfileError)
    if isinstance(data, dict) and "nodes" in data and "format" not in data:
        return from_published(data, str(path))
    return decode("profile", data, Profile, ProfileError, str(path))


def from_published(data: JsonObject, where: str = "profile") -> Profile:
    """A published layer graph as a Profile, for one whole mini-batch.

    The published form leaves some points open. They are resolved as follows:

    - a source whose description begins with "Input" is data loading: it stays as a layer, but costs nothing;
    - sinks whose description begins with "__getitem__" (unused parts of an output) are left out, in one pass;
    - the backward pass is published as one figure: half is assigned to the input and half to the weights,
      and all of it to the input where a layer has no weights;
    - bytes saved for the backward pass are not published: the output's bytes are taken instead.

    The layers come in a topological order, nodes that could be next in the order of the file.

    Raises:
        ProfileError: with `where` and the path inside the data; for a cycle, with a node on it.
    """
    with as_mistakes(ProfileError, where):
        graph = msgspec.convert(data, _Graph)
    index_of = _check(graph, where)
    edges = [(index_of[tail], index_of[head]) for tail, head in graph.edges]
    tails = {tail for tail, _ in edges}
    heads = {head for _, head in edges}
    unused = {i for i, node in enumerate(graph.nodes) if node.desc.startswith("__getitem__") and i not in tails}
    kept = [i for i in _topological(graph, edges, where) if i not in unused]
    place = {old: new for new, old in enumerate(kept)}
    layers = tuple(_layer(graph.nodes[i], is_source=i not in heads) for i in kept)
    links = sorted({(place[tail], place[head]) for tail, head in edges if head in place})
    with as_mistakes(ProfileError, where):
        return Profile(graph.model, graph.batch_size, layers, tuple(links), "as published", graph.source)


def _check(graph: _Graph, where: str) -> dict[str, int]:
    """Checks all nodes and edges of the file; returns the index of every node by its id."""
    index_of: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.id in index_of:
            raise ProfileError(f"{where}: nodes[{index}].id: {node.id!r} is also the id of nodes[{index_of[node.id]}]")
        index_of[node.id] = index
        check_finite(node, _Node.__struct_fields__[2:], f"{where}: nodes[{index}].")
    for index, edge in enumerate(graph.edges):
        for end, name in enumerate(edge):
            if name not in index_of:
                raise ProfileError(f"{where}: edges[{index}][{end}]: there is no node {name!r}")
    return index_of


def _topological(graph: _Graph, edges: Sequence[tuple[int, int]], where: str) -> list[int]:
    """An order in which data flows forward; among nodes that could be next, the earlier in the file."""
    sorter = TopologicalSorter[int]({node: () for node in range(len(graph.nodes))})
    for tail, head in edges:
        sorter.add(head, tail)
    try:
        sorter.prepare()
    except CycleError as problem:
        cycle = " → ".join(graph.nodes[node].id for node in problem.args[1])
        raise ProfileError(f"{where}: edges: the graph has a cycle: {cycle}; data must flow forward") from None
    ready = list(sorter.get_ready())
    order = []
    heapq.heapify(ready)
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for node in sorter.get_ready():
            heapq.heappush(ready, node)
    return order


def _layer(node: _Node, is_source: bool) -> Layer:
    name = f"{node.id} {' '.join(node.desc.split())}"
    if is_source and node.desc.startswith("Input"):
        return Layer(name, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    backward_s = node.backward_ms / 1000
    if node.parameter_bytes > 0:
        weight_s = backward_s / 2
    else:
        weight_s = 0.0
    return Layer(
        name,
        forward_s=node.forward_ms / 1000,
        backward_input_s=backward_s - weight_s,
        backward_weight_s=weight_s,
        output_bytes=node.activation_bytes,
        saved_bytes=node.activation_bytes,
        weight_bytes=node.parameter_bytes,
    )
