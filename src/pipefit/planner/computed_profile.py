"""Profiles of GPTs by arithmetic, without torch: every operation of Megatron-LM's layers through the roofline.

Legend: b micro-batch, s sequence, h hidden, a heads, l layers, V vocabulary, t tensor width, e bytes of an element.
Sources: Narayanan et al. (SC 2021), section 4 (fused operations) and the appendix (FLOP); Korthikanti et al. 2022,
section 4 (bytes kept).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pipefit.cost.collectives import Ring, all_reduce_s, even, ring_of
from pipefit.cost.roofline import pass_s, product_s
from pipefit.cost.tensor import tensor_shard
from pipefit.errors import ProfileError
from pipefit.spec import Device, Layer, Profile, Topology
from pipefit.spec.profile import ARITHMETIC

_DEFAULTS = {"vocab": 51200, "sequence": 2048}


def gpt_profile(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 51200,
    sequence: int = 2048,
    microbatch: int | Sequence[int] = 1,
    device: Device | None = None,
    *,
    element_bytes: int = 2,
    tensor: int = 1,
    topology: Topology | None = None,
) -> Profile:
    """A GPT as a chain: embedding, `layers` blocks, head.

    A block's forward takes 24bsh² + 4bs²h FLOP in matrix products, its backward twice that (half for the input, half for
    the weights); the head 2bshV. Norms, attention's softmax, GELU, dropout and residual move bytes (`_block`). Bytes
    kept from forward to backward: sbh(34 + 5as/h) in a block (that is at 2 bytes per element), which keeps the scores
    of attention. The head keeps its input and the logits in 4 bytes.

    >>> profile = gpt_profile(24, 2304, 24, device=Device(flops=312e12))
    >>> len(profile), round(sum(layer.weight_bytes for layer in profile.layers) / 2e9, 2)
    (26, 1.77)

    Args:
        layers: l.
        hidden: h.
        heads: a.
        vocab: V.
        sequence: s.
        microbatch: b, or several sizes.
        device: with `flops`, and for more than the FLOP of the products its other figures.
        element_bytes: of weights and activations.
        tensor: t: the profile is that of one of so many devices that share every layer, with their all-reduces.
        topology: whose innermost devices share a layer; None: their all-reduces are free.

    Raises:
        ProfileError: a size below 1, heads that do not divide the hidden size, or a device without FLOP/s.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "sequence": sequence}
    for name, value in sizes.items():
        if value < 1:
            raise ProfileError(f"gpt: {name}: expected at least 1, got {value}")
    if hidden % heads:
        raise ProfileError(f"gpt: heads: expected a divisor of the hidden size {hidden}, got {heads}")
    device = device or Device(flops=312e12)
    if not device.flops > 0:
        raise ProfileError('device.flops: computed profiles need it; give it in the topology: flops = "312 TFLOP/s"')
    many = [microbatch] if isinstance(microbatch, int) else list(microbatch)
    ring = ring_of(topology, range(tensor)) if topology else even(tensor, float("inf"), 0.0)
    found = [_at(sizes, b, device, element_bytes, ring) for b in many]
    return found[0].with_others(found[1:]) if len(found) > 1 else found[0]


def profile_at(profile: Profile, microbatch: int, tensor: int, topology: Topology) -> Profile:
    """The profile of one of t devices that share every layer, at a micro-batch size.

    A profile by arithmetic is computed again, with the shapes of these shards; any other is scaled.
    """
    device = profile.computed_for
    if device is None:
        return tensor_shard(profile.at(microbatch), tensor, topology)
    if tensor == 1 and microbatch == profile.microbatch_size:
        return profile
    sizes = gpt_settings(profile.model)
    size = profile.layers[0].output_bytes / profile.microbatch_size / sizes["hidden"] / sizes.get("sequence", 2048)
    more = {"element_bytes": round(size), "tensor": tensor}
    return gpt_profile(**sizes, microbatch=microbatch, device=device, topology=topology, **more)


class _Seconds(NamedTuple):
    """Seconds of a layer: its forward, and the halves of its backward."""

    forward_s: float
    input_s: float
    weight_s: float


def _products(device: Device, e: int, shapes: Iterable[tuple[int, int, int, int, int]]) -> _Seconds:
    """Seconds of products (count, m, n, k, weights): forward, and the gradients of both inputs.

    With `weights` 1 the second input is a weight, whose gradient is the other half of the backward; with 0 both are
    values, and both gradients belong to the first half.
    """
    forward_s = input_s = weight_s = 0.0
    for count, m, n, k, weights in shapes:
        forward_s += product_s(device, m, n, k, count, e)
        left, right = product_s(device, m, k, n, count, e), product_s(device, k, n, m, count, e)
        input_s += left + (0.0 if weights else right)
        weight_s += right if weights else 0.0
    return _Seconds(forward_s, input_s, weight_s)


def _block(device: Device, b: int, s: int, h: int, a: int, e: int, ring: Ring) -> _Seconds:
    """Seconds of a block on one of t devices.

    The products: queries, keys and values; scores; their use; projection; two of the feed-forward. Each line below is
    one kernel and counts its bytes per element of (s, b, h), or of (b, a, s, s) for the scores.
    """
    t, tokens = ring.size, b * s
    heads = -(-a // t)
    products = _products(
        device,
        e,
        [
            (1, tokens, -(-3 * h // t), h, 1),
            (b * heads, s, s, h // a, 0),
            (b * heads, s, h // a, s, 0),
            (1, tokens, h, -(-h // t), 1),
            (1, tokens, -(-4 * h // t), h, 1),
            (1, tokens, h, -(-4 * h // t), 1),
        ],
    )
    stream, scores = tokens * h, b * heads * s * s
    forward = [
        *(stream * 2 * e,) * 2,  # norms
        stream * 2 * e * 3 / t,  # bias of queries, keys and values
        scores * 2 * e,  # scale, mask and softmax
        scores * (2 * e + 1),  # dropout of the scores, with its mask
        stream * 2 * e / t,  # the heads side by side
        stream * 2 * e * 4 / t,  # bias and GELU
        *(stream * (3 * e + 1),) * 2,  # bias, dropout and residual
    ]
    backward_input = [
        *(stream * 3 * e,) * 2,  # norms
        *(stream * 3 * e,) * 2,  # sums of the gradients of residual and branch
        *(stream * (2 * e + 1),) * 2,  # dropout
        stream * 3 * e * 4 / t,  # GELU
        stream * 2 * e / t,  # the heads side by side
        scores * (2 * e + 1),  # dropout of the scores
        scores * 3 * e,  # softmax
    ]
    backward_weight = [
        *(stream * 2 * e,) * 2,  # norms
        *(stream * e * width for width in (3 / t, 1, 4 / t, 1)),  # biases
        *(3 * e * width * h * h / t for width in (3, 1, 4, 4)),  # sums of the gradients of all micro-batches
    ]
    wait_s = 2 * all_reduce_s(ring, stream * e)
    extra = [sum(pass_s(device, size) for size in kernels) for kernels in (forward, backward_input, backward_weight)]
    return _Seconds(
        products.forward_s + extra[0] + wait_s, products.input_s + extra[1] + wait_s, products.weight_s + extra[2]
    )


def _head(device: Device, b: int, s: int, h: int, vocab: int, e: int, ring: Ring) -> _Seconds:
    """Seconds of the projection to the vocabulary and of its loss, which works on logits in 4 bytes.

    Forward: conversion, maximum, difference, exponential, sum, quotient. Backward: gradient and conversion.
    """
    own, tokens = -(-vocab // ring.size), b * s
    found = _products(device, e, [(1, tokens, own, h, 1)])
    logits = tokens * own
    forward = [logits * size for size in (e + 4, 4, 8, 8, 4, 8)]
    backward = [logits * size for size in (8, 4 + e)]
    sums = pass_s(device, 3 * e * own * h)
    small_s = 3 * all_reduce_s(ring, 4 * tokens)
    return _Seconds(
        found.forward_s + sum(pass_s(device, size) for size in forward) + small_s,
        found.input_s + sum(pass_s(device, size) for size in backward) + all_reduce_s(ring, tokens * h * e),
        found.weight_s + sums,
    )


def _at(sizes: dict[str, int], b: int, device: Device, e: int, ring: Ring) -> Profile:
    num, h, a, vocab, s = (sizes[name] for name in ("layers", "hidden", "heads", "vocab", "sequence"))
    t, stream = ring.size, e * s * b * h
    # Of what a block saves, the inputs of its norms and of its sharded products and two masks are whole: 10 bytes.
    saved = stream * (10 + 24 / t + 5 * a * s / (h * t)) / 2
    logits = 4 * b * s * vocab / t
    tokens = 4 * b * s  # ids of 4 bytes
    weights = e * (12 * h * h + 13 * h) / t
    # The inputs of the products, of widths 3h, h, 4h and h; the sums of the second and the fourth are whole.
    halves = (7 / t + 2) * stream
    embed_s = pass_s(device, 2 * stream) + pass_s(device, 2 * stream) + all_reduce_s(ring, stream)
    scatter_s = pass_s(device, 2 * stream) + pass_s(device, 3 * e * -(-vocab // t) * h)
    made = [Layer("embedding", embed_s, scatter_s, 0.0, stream, tokens, e * (vocab + s) * h / t)]
    block = Layer("", *_block(device, b, s, h, a, e, ring), stream, saved, weights, half_bytes=halves)
    made += [msgspec.structs.replace(block, name=f"block{i}") for i in range(num)]
    # The projection to the vocabulary shares the embedding's weights; a copy of them is counted where it runs.
    head_s, head_weights = _head(device, b, s, h, vocab, e, ring), e * vocab * h / t
    made.append(Layer("head", *head_s, logits, stream + logits, head_weights, stream, half_bytes=logits))
    own = sum(layer.weight_bytes for layer in made)
    name = "gpt:" + ",".join(f"{key}={value}" for key, value in sizes.items() if _DEFAULTS.get(key) != value)
    return Profile(
        name,
        b,
        tuple(made),
        device=f"{device.flops / 1e12:g} TFLOP/s at {device.efficiency:.0%}",
        source=f"{ARITHMETIC}, {e} bytes per element",
        # Adam in mixed precision reads and writes 7 passes of 4 bytes and writes the working copy.
        optimizer_s=pass_s(device, own / e * 30),
        computed_for=msgspec.structs.replace(device, memory_bytes=0.0),
    )


def gpt_settings(text: str) -> dict[str, int]:
    """The sizes of "gpt:layers=96,hidden=12288,heads=96".

    Raises:
        ProfileError: a size is missing, unknown or not a whole number.
    """
    known = ("layers", "hidden", "heads", "vocab", "sequence")
    found: dict[str, int] = {}
    for part in text.removeprefix("gpt:").split(","):
        name, _, value = part.partition("=")
        if name.strip() not in known or not value.strip().isdecimal():
            raise ProfileError(f"{text}: expected NAME=NUMBER with one of {', '.join(known)}; got {part!r}")
        found[name.strip()] = int(value)
    for name in known[:3]:
        if name not in found:
            raise ProfileError(f"{text}: expected {name}=…, as in gpt:layers=96,hidden=12288,heads=96")
    return found


def is_gpt(profile: Profile) -> bool:
    """Returns whether tensor parallelism applies to the profile: it is a GPT, with a block per layer."""
    return profile.model.startswith("gpt") and len(profile) >= 3
