"""A backward in two halves that share no work: gradients of a stage's inputs first, those of its weights later.

        output ──► gelu ──► linear ──► norm ──► linear ──► input        the first half follows this path, and keeps
                              │          │         │                    the gradient at each node from which a
                           weights    weights   weights                 path to weights branches off
                                                                        the second half starts there

A node at which a path branches off runs in both halves: for its input in the first, for its weights in the second.
There are three exceptions. A weight that is used several times in a stage cannot be reached from its uses one by one.
Some nodes (a fused recurrent layer, a function written in Python) always make all their gradients. Gradients of
vectors, such as a norm's, take as long as reading the incoming gradient. There the first half makes the gradient of the
weight too, and the second half only adds it up.

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) §2, for the halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipefit.errors import ModelError

_AT_ONCE = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0")
"""Nodes that always make all their gradients."""


class Saved(NamedTuple):
    """The saved state of a forward for its backward.

    Attributes:
        inputs: the stage's inputs that need a gradient, leaves of its graph; or edges at which its graph ends.
        edges: at which the gradients of its outputs enter the graph. The outputs are not held.
    """

    inputs: Sequence[Tensor | GradientEdge]
    edges: list[GradientEdge]

    def entered(self, grads: Sequence[Tensor | None]) -> tuple[Saved, list[Tensor]]:
        """Returns the state with only the edges at which a gradient enters the graph, and these gradients."""
        came = [grad for grad in grads if grad is not None]
        if len(came) == len(grads):
            return self, came
        edges = [edge for edge, grad in zip(self.edges, grads, strict=True) if grad is not None]
        return Saved(self.inputs, edges), came


class WeightRun(NamedTuple):
    """A part of the second half: autograd from some edges to some weights.

    Attributes:
        edges: at which gradients enter the graph.
        grads: that enter there.
        weights: of the gradients to make; (): all that can be reached.
    """

    edges: tuple[GradientEdge, ...]
    grads: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()

    def joined(self, other: WeightRun) -> WeightRun:
        """Both parts as one."""
        return WeightRun(self.edges + other.edges, self.grads + other.grads, self.weights + other.weights)


def run_backward(
    roots: tuple[Tensor | GradientEdge, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor | GradientEdge, ...] = (),
    *,
    again: bool = False,
    accumulate: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.backward`, or `grad` when there are inputs, without their checks of every gradient's shape.

    The checks cost as much as the backward of a small stage; here shapes are a contract that messages keep.

    Args:
        roots: at which it starts.
        grads: of the roots.
        inputs: at which it ends; (): at every leaf.
        again: the graph is used once more.
        accumulate: whether gradients are added to `.grad` instead of returned.
    """
    return _engine.run_backward(roots, grads, again, False, inputs, allow_unreachable=True, accumulate_grad=accumulate)


def accumulate_backward(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Adds the gradients of all leaves that some edges reach to their `.grad`."""
    run_backward(tuple(edges), tuple(grads), accumulate=True)


_engine: Any = torch.autograd.Variable._execution_engine


def refuse_other_weights(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Refuses a loss that has a gradient for other weights than by the model's output: no rank would add it.

    Args:
        loss: with its graph, if it has one.
        outputs: of the model, that need a gradient.

    Raises:
        ModelError: it has one.
    """
    known = set(map(id, outputs))
    for node in _nodes_below(filter(None, [loss.grad_fn]), set()):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise ModelError(
                f"the loss has a gradient for a weight of shape {list(leaf.shape)}, which would be lost: a loss trains "
                "only by the model's output. Move weights of the loss into the model's last layer, and a penalty on "
                "weights into the optimizer (weight_decay) or the layers' output; use weights that do not train by "
                "detach(), or freeze them by requires_grad_(False)"
            )


def input_half(saved: Saved, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], list[WeightRun]]:
    """The gradients of a stage's inputs, and the remaining work for those of its weights.

    Args:
        saved: by the forward; to be held until the second half is done.
        grads: of the stage's outputs.

    Raises:
        ModelError: a weight with a hook is used several times, or inside a function written in Python; or a layer
            has a reentrant checkpoint.
    """
    roots, given = tuple(saved.edges), tuple(grads)
    if not roots:
        return [None] * len(saved.inputs), []
    if not saved.inputs:
        return [], [WeightRun(roots, given)]
    groups = _groups(_Ways(saved), saved.edges)
    captures = [edge for group in groups for edge in group.edges]
    try:
        found = run_backward(roots, given, (*saved.inputs, *captures), again=True)
    except RuntimeError as problem:
        if "use_reentrant=True" in str(problem):
            raise ModelError(
                "a layer uses torch.utils.checkpoint with use_reentrant=True, which cannot split a backward as this "
                "schedule does: give it use_reentrant=False, or choose a schedule such as 1f1b"
            ) from problem
        raise
    arrived = iter(found[len(saved.inputs) :])
    runs, early = [], WeightRun((), ())
    for group in groups:
        edges = []
        kept = []
        for edge in group.edges:
            grad = next(arrived)
            if grad is not None:
                edges.append(edge)
                kept.append(grad)
        edges += [roots[index] for index in group.roots]
        kept += [given[index] for index in group.roots]
        weights = (node.variable for node in group.weights)
        run = WeightRun(tuple(edges), tuple(kept), tuple(weights))
        if group.is_early:
            early = early.joined(run)
        else:
            runs.append(run)
    runs.append(early)
    return list(found[: len(saved.inputs)]), [run for run in runs if run.edges]


def weight_half(runs: list[WeightRun]) -> None:
    """Adds the gradients of the weights to their `.grad`, and frees the graph piece by piece."""
    runs.reverse()
    while runs:
        run = runs.pop()
        run_backward(run.edges, run.grads, run.weights, accumulate=True)


def _edge_of(leaf: Tensor | GradientEdge) -> GradientEdge:
    if isinstance(leaf, Tensor):
        return get_gradient_edge(leaf)
    return leaf


class _Ways:
    """The nodes of a stage's graph, by the ends of the paths from them.

    Attributes:
        children: of each node, its outgoing edges; every node comes after its children.
        to_input: the nodes with a path to an input.
        weights: of each node with paths only to weights: these weights.
        branches: of each node with paths to both: the edges to nodes of `weights`.
    """

    def __init__(self, saved: Saved) -> None:
        leaves = {_edge_of(leaf).node for leaf in saved.inputs}
        self.children = _nodes_below((edge.node for edge in saved.edges), leaves)
        self.to_input: set[Node] = set()
        self.weights: dict[Node, frozenset[Any]] = {}
        self.branches: dict[Node, list[GradientEdge]] = {}
        for node, children in self.children.items():
            if node in leaves:
                self.to_input.add(node)
            elif not children and getattr(node, "variable", None) is not None:
                self.weights[node] = frozenset((node,))
            elif any(child in self.to_input for child, _ in children):
                self.to_input.add(node)
                if branches := [GradientEdge(*edge) for edge in children if edge[0] in self.weights]:
                    self.branches[node] = branches
            elif found := frozenset().union(*(self.weights.get(child, ()) for child, _ in children)):
                self.weights[node] = found

    def entries(self, roots: Sequence[GradientEdge]) -> dict[Node, list[GradientEdge]]:
        """The edges by which gradients arrive at each node of `branches`."""
        edges = [(edge.node, edge.output_nr) for edge in roots]
        for node in self.to_input:
            edges += self.children[node]
        entries: dict[Node, list[GradientEdge]] = {node: [] for node in self.branches}
        for node, slot in dict.fromkeys(edges):
            if node in entries:
                entries[node].append(GradientEdge(node, slot))
        return entries


def _nodes_below(starts: Iterable[Node], ends: set[Node]) -> dict[Node, list[tuple[Node, int]]]:
    """All nodes down to some ends, each with its outgoing edges; every node comes after its children."""
    done = {}
    stack: list[tuple[Node, list[tuple[Node, int]] | None]] = [(node, None) for node in starts]
    while stack:
        node, children = stack.pop()
        if children is not None:
            done[node] = children
        elif node not in done:
            children = []
            if node not in ends:
                leaving: Any = node.next_functions
                children += [(child, slot) for child, slot in leaving if child is not None]
            stack.append((node, children))
            stack += [(child, None) for child, _ in children if child not in done]
    return done


@dataclass(eq=False)
class _Group:
    """Branches that lead to the same weights, and are therefore followed together.

    Attributes:
        nodes: at which paths branch off.
        weights: at the ends of these paths.
        roots: the outputs that lead only there, by number.
        edges: at which the first half stops.
        is_early: whether the first half makes the gradients of the weights, and the second only adds them up.
    """

    nodes: set[Node] = field(default_factory=set)
    weights: set[Any] = field(default_factory=set)
    roots: list[int] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    is_early: bool = False


def _groups(ways: _Ways, roots: Sequence[GradientEdge]) -> list[_Group]:
    """The branches of a graph by the weights they lead to, starting at the outputs, with the edges to be kept."""
    groups: dict[Any, _Group] = {}

    def joined(weights: Iterable[Any]) -> _Group:
        own = _Group()
        for weight in weights:
            other = groups.get(weight)
            if other is not None and other is not own:
                own.nodes |= other.nodes
                own.weights |= other.weights
                own.roots += other.roots
                groups.update(dict.fromkeys(other.weights, own))
            own.weights.add(weight)
            groups[weight] = own
        return own

    for node in reversed(ways.children):
        if node in ways.branches:
            weights = (w for edge in ways.branches[node] for w in ways.weights[edge.node])
            joined(weights).nodes.add(node)
    for index, edge in enumerate(roots):
        if edge.node in ways.weights:
            joined(ways.weights[edge.node]).roots.append(index)
    entries = ways.entries(roots)
    result = list(dict.fromkeys(groups.values()))
    for group in result:
        group.is_early = _is_early(ways, group)
        start = entries
        if group.is_early:
            start = ways.branches
        for node in group.nodes:
            group.edges += start[node]
        group.edges = list(dict.fromkeys(group.edges))
        if group.is_early and _overlap(ways, group, roots):
            group.edges = [GradientEdge(weight, 0) for weight in group.weights]
            group.roots = []
    return result


def _overlap(ways: _Ways, group: _Group, roots: Sequence[GradientEdge]) -> bool:
    """Returns whether a path from one start of an early group passes another, so that a gradient would count twice.

    This happens where a part of the stage without inputs, such as a decoder's first layers, is used at several places.
    """
    captured = {edge.node for edge in group.edges}
    ends = {roots[index].node for index in group.roots}
    if captured & ends:
        return True
    starts = captured | ends
    below = {child for node in starts for child, _ in ways.children[node]}
    while below:
        if not below.isdisjoint(starts):
            return True
        below = {child for node in below for child, _ in ways.children[node]}
    return False


def _is_early(ways: _Ways, group: _Group) -> bool:
    """Returns whether the first half makes the gradients of a group's weights: it must, or it costs nothing."""
    next_ones = (edge.node for node in group.nodes for edge in ways.branches[node])
    hooked = any(getattr(getattr(node, "variable", None), "_backward_hooks", None) for node in next_ones)
    nodes: list[Any] = list(group.nodes)
    at_once = any(isinstance(node, BackwardCFunction) or node.name() in _AT_ONCE for node in nodes)
    if not at_once and len(group.nodes) == 1:
        # The gradient of a vector takes as long as reading the incoming gradient.
        return not hooked and all(node.variable.dim() < 2 for node in group.weights)
    if hooked:
        raise ModelError(
            "a weight with a hook (register_hook) is used several times in a stage, or in an autograd.Function: "
            "a backward in two halves would call the hook twice; use a schedule with whole backwards, such as 1f1b"
        )
    return True
