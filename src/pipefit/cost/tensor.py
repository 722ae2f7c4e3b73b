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


def widened(
    profile: Profile, tensor: int, seconds: Callable[[float], float], *, ends: bool = False, sequence: bool = False
) -> Profile:
    """A GPT's layers divided over t devices as Megatron-LM divides them: what one of the t has of each.

    Each block makes two all-reduces of its output in the forward and two in the backward, not overlapped:
    8·b·s·h·(t−1)/t elements in all. Of the s·b·h(34 + 5as/h) bytes that a block keeps, s·b·h·10 are not divided (five
    times its output). Embedding and head are divided by the vocabulary.

    Args:
        profile: an embedding, a layer per block, a head.
        tensor: t.
        seconds: of an all-reduce of so many bytes among the t.
        ends: count also the one of the embedding's forward and the one of the head's backward.
        sequence: the sequence is divided too: then the gradients of a layer's whole weights are summed, a short message
            in each backward; and all that a block keeps is divided.
    """
    if tensor == 1:
        return profile
    layers = []
    last = len(profile) - 1
    for index, layer in enumerate(profile.layers):
        inner = 0 < index < last
        forward = 2 if inner else int(ends and index == 0)
        backward = 2 if inner else int(ends and index == last)
        # What the head's backward sums is the gradient of its input, which is as large as a block's output.
        wait_s = seconds(profile.layers[index - 1].output_bytes if index == last else layer.output_bytes)
        whole = min(layer.saved_bytes, 5 * layer.output_bytes) if inner and not sequence else 0.0
        layers.append(
            Layer(
                layer.name,
                layer.forward_s / tensor + forward * wait_s,
                layer.backward_input_s / tensor + backward * wait_s + (seconds(0) if sequence else 0.0),
                layer.backward_weight_s / tensor,
                layer.output_bytes,
                whole + (layer.saved_bytes - whole) / tensor,
                layer.weight_bytes / tensor,
                layer.grad_bytes,
            )
        )
    return msgspec.structs.replace(profile, layers=tuple(layers), others=())
