"""What tensor parallelism makes of a profile: layers divided, and the waits for each other inside them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Level

__all__ = ["all_reduce_s", "widened"]


def all_reduce_s(size: float, tensor: int, link: Level) -> float:
    """Seconds in which t devices sum `size` bytes: 2(t−1)/t·bytes / bandwidth + 2·⌈log2 t⌉·latency."""
    moved = 2 * (tensor - 1) / tensor * size
    return moved / link.bandwidth_bytes_per_s + 2 * (tensor - 1).bit_length() * link.latency_s


def widened(profile: Profile, tensor: int, seconds: Callable[[float], float]) -> Profile:
    """A GPT's layers divided over t devices as Megatron-LM divides them: what one of the t has of each, by arithmetic.

    Each block makes two all-reduces of its output in the forward and two in the backward, not overlapped:
    8·b·s·h·(t−1)/t elements in all. Of the s·b·h(34 + 5as/h) bytes that a block keeps, s·b·h·10 are not divided (five
    times its output). Embedding and head are divided by the vocabulary.

    Args:
        profile: an embedding, a layer per block, a head.
        tensor: t.
        seconds: of an all-reduce of so many bytes among the t.
    """
    if tensor == 1:
        return profile
    layers = []
    for index, layer in enumerate(profile.layers):
        inner = 0 < index < len(profile) - 1
        wait_s = 2 * seconds(layer.output_bytes) if inner else 0.0
        whole = min(layer.saved_bytes, 5 * layer.output_bytes) if inner else 0.0
        # Of what a backward in two halves keeps: what enters the two products whose outputs are summed.
        kept = min(layer.kept_bytes, 2 * layer.output_bytes) if inner else 0.0
        layers.append(
            Layer(
                layer.name,
                layer.forward_s / tensor + wait_s,
                layer.backward_input_s / tensor + wait_s,
                layer.backward_weight_s / tensor,
                layer.output_bytes,
                whole + (layer.saved_bytes - whole) / tensor,
                layer.weight_bytes / tensor,
                layer.grad_bytes,
                half_bytes=kept + (layer.kept_bytes - kept) / tensor,
            )
        )
    return msgspec.structs.replace(profile, layers=tuple(layers), others=())
