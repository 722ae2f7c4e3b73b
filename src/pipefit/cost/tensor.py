"""A profile under tensor parallelism, by arithmetic: sharded layers, and the communication inside them."""

from __future__ import annotations

import msgspec

from pipefit.cost.rings import all_reduce_s, ring_of
from pipefit.spec.counted import SharedWeights
from pipefit.spec.profile import WORK, Layer, Profile
from pipefit.spec.topology import Topology

_WHOLE = {"embedding": (2, 2, 0, 0), "block": (5, 3, 0, 0), "head": (1, 1, 1, 1)}
"""How much of the work of a layer is not sharded, in outputs of a block, in the order of `WORK`.

A block's forward saves five of them, and has three at once where it saves nothing.
"""


def tensor_shard(profile: Profile, tensor: int, topology: Topology) -> Profile:
    """Profile of one of t devices that share each layer of a GPT as Megatron-LM shards them.

    Each block makes two all-reduces of its output in the forward and two in the backward, not overlapped:
    8·b·s·h·(t−1)/t elements in all. Of the s·b·h(34 + 5as/h) bytes that a block saves, s·b·h·10 are not sharded (five
    times its output). Embedding and head are sharded by the vocabulary, and every device steps its part of the weights.
    The seconds of a shard are 1/t of those of its layer: of a profile by GPT arithmetic they follow from the shapes of
    the shard instead (`pipefit.planner.computed_profile.profile_at`).

    Args:
        profile: an embedding, a layer per block, a head.
        tensor: t.
        topology: whose innermost devices share a layer.
    """
    if tensor == 1:
        return profile
    ring = ring_of(topology, range(tensor))
    stream = profile.layers[0].output_bytes
    layers = []
    for index, layer in enumerate(profile.layers):
        wait_s = 0.0
        whole = 0.0
        kept = 0.0
        kind = "embedding"
        if index == len(profile) - 1:
            kind = "head"
        elif index:
            kind = "block"
            wait_s = 2 * all_reduce_s(ring, layer.output_bytes)
            whole = min(layer.saved_bytes, 5 * layer.output_bytes)
            # A backward in two halves keeps the inputs of the two products whose outputs are summed.
            kept = min(layer.kept_bytes, 2 * layer.output_bytes)
        backward_wait_s = 0.0
        if layer.backward_s:
            backward_wait_s = wait_s
        trained = layer.trained_bytes
        if trained is not None:
            trained /= tensor
        # Scores, and with them the cores of attention, are sharded; what is not is kept in any case.
        chosen = layer.selective_bytes
        if chosen is not None:
            chosen = whole + (chosen - whole) / tensor
        layers.append(
            Layer(
                layer.name,
                layer.forward_s / tensor + wait_s,
                layer.backward_input_s / tensor + backward_wait_s,
                layer.backward_weight_s / tensor,
                layer.output_bytes,
                whole + (layer.saved_bytes - whole) / tensor,
                layer.weight_bytes / tensor,
                layer.grad_bytes,
                half_bytes=kept + (layer.kept_bytes - kept) / tensor,
                step_s=layer.step_s / tensor,
                trained_bytes=trained,
                input_bytes=layer.input_bytes,
                selective_bytes=chosen,
                attention_s=layer.attention_s / tensor,
                step_work_bytes=layer.step_work_bytes / tensor,
                inner_bytes=layer.inner_bytes,
                copy_bytes=layer.copy_bytes / tensor,
                **_work(layer, kind, stream, tensor),
            )
        )
    shared = [
        SharedWeights(one.layers, one.weight_bytes / tensor, one.trained_bytes / tensor) for one in profile.shared
    ]
    return msgspec.structs.replace(
        profile,
        layers=tuple(layers),
        shared=tuple(shared),
        optimizer_s=profile.optimizer_s / tensor,
        loss_work_bytes=profile.loss_work_bytes / tensor,
        step_work_bytes=profile.step_work_bytes / tensor,
        others=(),
    )


def _work(layer: Layer, kind: str, stream: float, tensor: int) -> dict[str, float]:
    """The work of a shard, where that of the layer is known."""
    found = {}
    for name, multiple in zip(WORK, _WHOLE[kind], strict=True):
        size = getattr(layer, name)
        if size is not None:
            whole = min(size, multiple * stream)
            found[name] = whole + (size - whole) / tensor
    return found
