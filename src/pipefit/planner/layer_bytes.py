"""What a model's layers take of a device to the byte, where the layers are at hand: what a cap is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipefit.cost import CostModel
from pipefit.ir.spill import GRAIN_BYTES
from pipefit.spec import Partition

__all__ = ["LayerBytes", "Sizes"]

_NOTED_BYTES = 1024
"""What torch, and the runtime, note beside each tensor of an activation, gradient or loss: some 0.7 KB of torch 2.13's
objects on a 64-bit Linux."""


_LINKS_BYTES = 32 << 10
"""What Gloo and the transport note of messages under way: up to 20 KB in a pipeline of two processes."""


class LayerBytes(NamedTuple):
    """What a layer takes.

    Attributes:
        weights: as they lie in a record, each aligned.
        states: of the optimizer, likewise.
        beside: what stays on the device wherever the layer's weights are: its buffers.
        num_tensors: its parameters, each of which has a gradient while it is there.
    """

    weights: float
    states: float
    beside: float = 0.0
    num_tensors: int = 0


@dataclass(frozen=True)
class Sizes:
    """What all layers take, and the weights that they share.

    Attributes:
        layers: each of them, what it shares included.
        ties: of each group of layers, the weights that they share, which stay on the device where stages do.
    """

    layers: tuple[LayerBytes, ...]
    ties: tuple[tuple[tuple[int, ...], LayerBytes], ...] = ()

    def of(
        self, cost: CostModel, partition: Partition, depth: int, num_microbatches: int, parked: bool = False
    ) -> CostModel:
        """The costs of a cut, with these bytes: records are whole blocks, and tensors have notes beside them.

        Args:
            cost: of the stages.
            partition: which layers they have.
            depth: ranks of each pipeline, to which stages are dealt out in turn.
            num_microbatches: whose losses wait for the end of the pass.
            parked: activations come back from the tier, in whole blocks too.
        """
        num_stages = len(partition.stages)
        weights, states, beside, tensors = (
            [sum(self.layers[layer][which] for layer in stage.layers) for stage in partition.stages]
            for which in range(4)
        )
        # The first slot begins at a block, wherever the allocator has put it.
        for first in range(min(depth, num_stages)):
            # One of its stages computes, another may still have its gradients.
            noted = num_microbatches + sum(sorted(tensors[first::depth])[-2:])
            beside[first] += GRAIN_BYTES + noted * _NOTED_BYTES + (_LINKS_BYTES if depth > 1 else 0)
        owner = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
        shared = dict(cost.tied_bytes)
        for group, tie in self.ties:
            users = sorted({owner[layer] for layer in group})
            if len(users) == 1:
                continue
            shared[users[0]] = shared.get(users[0], 0) + tie.weights
            for user in users:
                weights[user] -= tie.weights
                states[user] -= tie.states
            # Weights and gradients; and a copy of these that is on its way to the other ranks.
            for user in {user % depth: user for user in users}.values():
                beside[user] += 3 * tie.weights + tie.states
        crossing = (_parked if parked else _noted)(cost.act_bytes)
        return replace(
            cost,
            weight_bytes=tuple(map(_blocks, weights)),
            optim_bytes=tuple(map(_blocks, states)),
            beside_bytes=tuple(beside),
            act_bytes=crossing,
            grad_bytes=_noted(cost.grad_bytes),
            tied_bytes=shared,
        )


def _blocks(num_bytes: float) -> float:
    """Whole blocks.

    >>> _blocks(1), _blocks(8192)
    (4096, 8192)
    """
    return -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES


def _noted(sizes: Sequence[float]) -> tuple[float, ...]:
    return tuple(size + _NOTED_BYTES if size else 0.0 for size in sizes)


def _parked(sizes: Sequence[float]) -> tuple[float, ...]:
    """Records of their own, each aligned."""
    return _noted([_blocks(size) + GRAIN_BYTES if size else 0.0 for size in sizes])
