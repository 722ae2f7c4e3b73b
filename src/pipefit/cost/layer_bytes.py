"""Exact bytes of a model's layers on a device, from the layers themselves, to be compared with a cap on memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipefit.ir.instruction import Indices
from pipefit.ir.spill import GRAIN_BYTES
from pipefit.spec.plan import Plan

if TYPE_CHECKING:
    from pipefit.cost.model import CostModel

_TENSOR_BYTES = 1024
"""Torch's and the runtime's own objects for each tensor of an activation, gradient or loss: some 0.7 KB with torch
2.13 on a 64-bit Linux."""

_LINKS_BYTES = 32 << 10
"""Memory of Gloo and the transport for open messages: up to 20 KB in a pipeline of two processes."""


class LayerBytes(NamedTuple):
    """Bytes of a layer.

    Attributes:
        weights: in a record, each aligned.
        states: of the optimizer, likewise.
        buffers: bytes that stay on the device while the layer's weights are away.
        num_tensors: number of its parameters that train, each of which has a gradient while the layer is on the device.
        gradients: of the weights that train, as they lie in a record.
    """

    weights: float
    states: float
    buffers: float = 0.0
    num_tensors: int = 0
    gradients: float = 0.0


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of all layers, and of the weights that they share.

    Attributes:
        layers: of each layer, including the weights that it shares.
        ties: of each group of layers, the shared weights, which stay on the device where stages do.
    """

    layers: tuple[LayerBytes, ...]
    ties: tuple[tuple[Indices, LayerBytes], ...] = ()

    def figures(self, cost: CostModel, plan: Plan) -> dict[str, Any]:
        """Fields of a plan's `CostModel` with these bytes: records are whole blocks, and tensors have objects.

        Args:
            cost: of the plan by its profile.
            plan: whose stages they are; its ranks hold stages p apart.
        """
        stages = plan.partition.stages
        num_stages = len(stages)
        depth = num_stages // plan.num_chunks

        def total(which: int) -> list[float]:
            found = []
            for stage in stages:
                figures = [self.layers[layer][which] for layer in stage.layers]
                found.append(sum(figures))
            return found

        weights, states, fixed, tensors, gradients = map(total, range(5))
        # The first slot begins at a block, at any address from the allocator.
        for first in range(min(depth, num_stages)):
            # One of its stages computes, another may still have its gradients; losses wait for the end of the pass.
            largest = sorted(tensors[first::depth])[-2:]
            present = plan.num_microbatches + sum(largest)
            fixed[first] += GRAIN_BYTES + present * _TENSOR_BYTES
            if depth > 1:
                fixed[first] += _LINKS_BYTES
        owner = plan.partition.stage_of
        shared = dict(cost.tied_bytes)
        for group, tie in self.ties:
            users = sorted({owner[layer] for layer in group})
            if len(users) == 1:
                continue
            first_user = users[0]
            shared[first_user] = shared.get(first_user, 0) + tie.weights
            for user in users:
                weights[user] -= tie.weights
                gradients[user] -= tie.gradients
                states[user] -= tie.states
            # Weights and gradients; and a copy of these that is on its way to the other ranks.
            for user in {user % depth: user for user in users}.values():
                fixed[user] += 3 * tie.weights + tie.states
        acts: Iterable[float] = cost.act_bytes
        if plan.spill is not None and plan.spill.activations:
            acts = map(_record, acts)
        return {
            "weight_bytes": tuple(map(_blocks, weights)),
            "wgrad_bytes": tuple(map(_blocks, gradients)),
            "optim_bytes": tuple(map(_blocks, states)),
            "fixed_bytes": tuple(fixed),
            "act_bytes": _with_objects(acts),
            "grad_bytes": _with_objects(cost.grad_bytes),
            "tied_bytes": shared,
        }


def _blocks(num_bytes: float) -> float:
    """Whole blocks.

    >>> _blocks(1), _blocks(8192)
    (4096, 8192)
    """
    return -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES


def _record(size: float) -> float:
    """Bytes of an activation that is fetched from the tier: a record of its own, aligned."""
    if size:
        return _blocks(size) + GRAIN_BYTES
    return 0.0


def _with_objects(sizes: Iterable[float]) -> tuple[float, ...]:
    return tuple(size + _TENSOR_BYTES if size else 0.0 for size in sizes)
