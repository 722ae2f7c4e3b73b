"""The timed passes: the whole model, the same with a mark at every layer, input gradients only, and halves.

Marks are in the graph of the *whole* step, so the seconds of the layers add up to it. In the forward they are between
the calls. In the backward a hook on the output of layer k fires when the gradient of that output is complete, which is
the begin of the backward pass of layer k: autograd's engine runs ready nodes in the reverse of the order in which they
were made, so no node of layer k runs before every node of the layers after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipefit.errors import ModelError
from pipefit.profiling.clock import Clock
from pipefit.profiling.live_bytes import Growth, LiveBytes
from pipefit.profiling.tensors import cut_off, describe, graded, map_tensors, num_bytes, parameters_of, tensors_of
from pipefit.runtime.halves import Saved, input_half, weight_half
from pipefit.stage.replay import AttentionCores
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Loss, checked_loss

Reached = list[tuple[int, Any]]
"""Layers with the marks at which their backwards began, in order."""


@dataclass(frozen=True)
class Marked:
    """Seconds of one marked pass: forward and backward of each layer, and of the loss (both ways)."""

    forward_s: list[float]
    backward_s: list[float]
    loss_s: float


class Work(NamedTuple):
    """Bytes by which memory grows in three passes, in place of seconds.

    Attributes:
        bare: a pass without gradients.
        first: one whose weights have no gradients yet.
        further: one that adds to their gradients.
    """

    bare: Marked
    first: Marked
    further: Marked

    def of_layer(self, index: int) -> dict[str, float]:
        """The figures of a layer's profile by their names."""
        return {
            "forward_work_bytes": self.further.forward_s[index],
            "bare_work_bytes": self.bare.forward_s[index],
            "backward_work_bytes": self.further.backward_s[index],
            "first_work_bytes": self.first.backward_s[index],
        }


def seed_bytes(loss: Loss, output: Any, target: Any) -> float:
    """Bytes of the gradients with which a backward begins: a loss gives none to outputs that it does not use."""
    given = map_tensors(cut_off, output)
    value = _value(loss, given, target)
    leaves = graded(tensors_of(given))
    if not (leaves and value.requires_grad):
        return 0
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return num_bytes(grad for grad in grads if grad is not None)


def _value(loss: Loss, output: Any, target: Any) -> Tensor:
    try:
        returned = loss(output, target)
    except Exception as error:
        given = f"{describe(output)} and target {describe(target)}"
        raise ModelError(f"the loss raised {type(error).__name__} on {given}: {error}") from error
    value, _ = checked_loss(returned)
    return value


@dataclass(frozen=True)
class Step:
    """One micro-batch through the whole model; gradients add up in `.grad`, as after the first micro-batch."""

    chain: Sequence[NamedLayer]
    payload: Any
    loss: Loss | None
    target: Any
    clock: Clock
    has_cores: bool = False

    def plain(self) -> float:
        """Seconds of forward, loss and backward, without marks."""
        return self.clock.seconds(self._once)

    def _once(self) -> None:
        payload = self.payload
        for layer in self.chain:
            payload = layer.module(payload)
        roots, seeds = self._roots(payload)
        if roots:
            torch.autograd.backward(roots, seeds)

    def marked(self) -> Marked:
        """Seconds of each layer, forward and full backward."""
        return self._marked(lambda roots, seeds, _: torch.autograd.backward(roots, seeds))

    def work(self) -> Work:
        """Bytes by which memory grows in each layer, and in the loss."""
        device = self.clock.device
        with LiveBytes(device.type) as count:
            grown = replace(self, clock=Growth(count, device))
            # A layer that recomputes itself in torch's old form warns of inputs without gradients.
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                bare = grown.marked()
            for parameter in parameters_of(self.chain):
                parameter.grad = None
            return Work(bare, grown.marked(), grown.marked())

    def inputs_only(self) -> Marked:
        """As `marked`, with a backward pass that makes no gradient of a weight."""
        return self._marked(_input_gradients)

    def attended(self) -> list[float]:
        """Seconds of the cores of attention in the forward of each layer."""
        clock = self.clock
        payload = self.payload
        marks: list[list[tuple[Any, Any]]] = []

        def timed(core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return core(*args, **kwargs)  # part of what is compiled: it has no time of its own
            begin = clock.mark()
            output = core(*args, **kwargs)
            marks[-1].append((begin, clock.mark()))
            return output

        with AttentionCores(timed):
            for layer in self.chain if self.has_cores else ():
                marks.append([])
                payload = layer.module(payload)
        clock.settle()
        return [sum(clock.between(*pair) for pair in pairs) for pairs in marks]

    def halved(self) -> list[tuple[float, float]] | None:
        """Seconds of each layer's backward in two halves, in isolation; None where one cannot be halved.

        Autograd traverses the whole graph below its start, so each layer has its own graph.
        """
        clock = self.clock
        payload = self.payload
        borders = []
        for layer in self.chain:
            payload = map_tensors(cut_off, payload)
            # Edges of the graph as it is now: the layer may change its input in place.
            inputs = list(map(get_gradient_edge, graded(tensors_of(payload))))
            payload = layer.module(payload)
            outputs = graded(tensors_of(payload))
            given = Saved(inputs, list(map(get_gradient_edge, outputs)))
            borders.append((given, [torch.ones_like(leaf) for leaf in outputs]))
        del payload, outputs
        marks = []
        try:
            while borders:
                given, grads = borders.pop()
                start = clock.mark()
                runs = input_half(given, grads)[1]
                between = clock.mark()
                weight_half(runs)
                marks.append((start, between, clock.mark()))
        except (ModelError, RuntimeError):
            return None
        clock.settle()
        seconds = []
        for start, between, end in reversed(marks):
            seconds.append((clock.between(start, between), clock.between(between, end)))
        return seconds

    def _roots(self, output: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """The roots of the backward pass and their gradients; nothing where nothing is trained."""
        if self.loss is None:
            roots = graded(tensors_of(output))
            return roots, [torch.ones_like(root) for root in roots]
        value = _value(self.loss, output, self.target)
        if value.requires_grad:
            return ([value], [None])
        return ([], [])

    def _marked(self, backward: Callable[[list[Tensor], list[Tensor | None], list[GradientEdge]], object]) -> Marked:
        clock = self.clock
        payload = self.payload
        calls: list[tuple[Any, Any]] = []
        reached: Reached = []
        # Edges of the graph, not tensors: an output is freed as early as in the plain pass.
        edges = []
        nodes: set[Any] = set()

        def watch(index: int, output: Any) -> None:
            for leaf in tensors_of(output):
                # A tensor that a layer returns unchanged is marked where it was made.
                if leaf.grad_fn is not None and leaf.grad_fn not in nodes:
                    leaf.register_hook(_hook(index, reached, clock))
                    edges.append(get_gradient_edge(leaf))
            nodes.update(edge.node for edge in edges)

        for index, layer in enumerate(self.chain):
            begin = clock.mark()
            payload = layer.module(payload)
            calls.append((begin, clock.mark()))
            watch(index, payload)
        loss_start = clock.mark()
        roots, seeds = self._roots(payload)
        start = clock.mark()
        if roots:
            backward(roots, seeds, edges)
        end = clock.mark()
        clock.settle()
        backward_s, loss_back_s = self._segments(reached, start, end)
        forward_s = [clock.between(begin, stop) for begin, stop in calls]
        return Marked(forward_s, backward_s, clock.between(loss_start, start) + loss_back_s)

    def _segments(self, reached: Reached, start: Any, end: Any) -> tuple[list[float], float]:
        """Seconds of each layer's backward pass and, up to the first mark, of the loss's."""
        seconds = [0.0] * len(self.chain)
        # From the last mark back: each layer's segment ends where the next one begins.
        for index, begin in reversed(reached):
            seconds[index] += self.clock.between(begin, end)
            end = begin
        return seconds, self.clock.between(start, end)


def _hook(index: int, reached: Reached, clock: Clock) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        # A payload of several tensors begins with the first of them.
        if not reached or reached[-1][0] != index:
            reached.append((index, clock.mark()))

    return hook


def _input_gradients(roots: list[Tensor], seeds: list[Tensor | None], boundaries: list[GradientEdge]) -> None:
    if not boundaries:
        return
    try:
        torch.autograd.grad(roots, boundaries, seeds, allow_unused=True)
    except RuntimeError as error:
        raise ModelError(
            f"input gradients cannot be computed without weight gradients: {error} "
            "(a layer that recomputes itself needs checkpoint(..., use_reentrant=False))"
        ) from error
