"""Profiles of GPTs by arithmetic, without torch: every operation of Megatron-LM's layers through the roofline.

Legend: b micro-batch, s sequence, h hidden, a heads, l layers, V vocabulary, t tensor width, e bytes of an element.
Sources: Narayanan et al. (SC 2021), section 4 (fused operations) and the appendix (FLOP); Korthikanti et al. 2022,
section 4 (bytes kept).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pipefit.cost.rings import Ring, all_reduce_s, even, ring_of
from pipefit.cost.roofline import pass_s, product_s, slowest_of
from pipefit.cost.tensor import tensor_shard
from pipefit.errors import ProfileError
from pipefit.planner.ptdp import Gpt
from pipefit.spec import Device, Layer, Profile, Topology
from pipefit.spec.profile import ARITHMETIC

_DEFAULTS = {"vocab": 51200, "sequence": 2048, "bytes": 2}


def gpt_profile(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 51200,
    sequence: int = 2048,
    microbatch: int | Sequence[int] = 1,
    device: Device | None = None,
    *,
    bytes: int = 2,
    tensor: int = 1,
    topology: Topology | None = None,
) -> Profile:
    """A GPT as a chain: embedding, `layers` blocks, head.

    A block's forward takes 24bsh² + 4bs²h FLOP in matrix products, its backward twice that (half for the input, half
    for the weights); the head 2bshV. Norms, attention's softmax, GELU, dropout and residual move bytes (`_block`).
    Bytes kept from forward to backward: sbh(34 + 5as/h) in a block (that is at 2 bytes per element), which keeps
    the scores of attention. The head keeps its input and the logits in 4 bytes.

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
        bytes: of an element of weights and activations: 2 (Adam then has a master copy), or 4.
        tensor: t: the profile is that of one of so many devices that share every layer, with their all-reduces.
        topology: whose innermost devices share a layer, and whose slowest device sets the pace; None: all-reduces are
            free, and devices alike.

    Raises:
        ProfileError: a size below 1, other bytes, heads that do not divide the hidden size, or a device without
            FLOP/s.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "sequence": sequence}
    for name, value in sizes.items():
        if value < 1:
            raise ProfileError(f"gpt: {name}: expected at least 1, got {value}")
    if bytes not in (2, 4):
        raise ProfileError(f"gpt: bytes: expected 2 or 4, got {bytes}")
    sizes["bytes"] = bytes
    if hidden % heads:
        raise ProfileError(f"gpt: heads: expected a divisor of the hidden size {hidden}, got {heads}")
    device = device or Device(flops=312e12)
    if not device.flops > 0:
        raise ProfileError('device.flops: computed profiles need it; give it in the topology: flops = "312 TFLOP/s"')
    made_for = msgspec.structs.replace(device, memory_bytes=0.0)
    if isinstance(microbatch, int):
        many = [microbatch]
    else:
        many = list(microbatch)
    if topology:
        ring = ring_of(topology, range(tensor))
        pace = slowest_of(device, topology.num_devices)
    else:
        ring = even(tensor, float("inf"), 0.0)
        pace = device
    found = []
    for b in many:
        made = _at(sizes, b, pace, bytes, ring)
        found.append(msgspec.structs.replace(made, computed_for=made_for))
    if len(found) > 1:
        return found[0].with_others(found[1:])
    return found[0]


def profile_at(profile: Profile, microbatch: int, tensor: int, topology: Topology) -> Profile:
    """The profile of one of t devices that share every layer, at a micro-batch size.

    A profile by arithmetic is computed again, with the shapes of these shards; any other is scaled.
    """
    device = profile.computed_for
    if device is None:
        return tensor_shard(profile.at(microbatch), tensor, topology)
    sizes: dict[str, Any] = gpt_settings(profile.model)
    return gpt_profile(**sizes, microbatch=microbatch, device=device, topology=topology, tensor=tensor)


def _products_s(device: Device, shapes: Iterable[tuple[int, int, int]], e: int) -> tuple[float, float, float]:
    """Seconds of products of inputs (m, k) and weights (k, n): forward, gradients of the inputs, of the weights."""
    forward_s = 0.0
    input_s = 0.0
    weight_s = 0.0
    for m, n, k in shapes:
        forward_s += product_s(device, m, n, k, 1, e)
        input_s += product_s(device, m, k, n, 1, e)
        weight_s += product_s(device, k, n, m, 1, e)
    return forward_s, input_s, weight_s


def _passes_s(device: Device, sizes: Iterable[float]) -> float:
    """Seconds of kernels that move so many bytes each."""
    return sum(pass_s(device, size) for size in sizes)


def _core_s(device: Device, b: int, s: int, heads: int, width: int, e: int) -> float:
    """Seconds of the core of attention forward: scores; scale, mask and softmax; dropout with its mask; their use."""
    scores = b * heads * s * s
    made_s = product_s(device, s, s, width, b * heads, e)
    used_s = product_s(device, s, width, s, b * heads, e)
    softmax_s = pass_s(device, 2 * e * scores)
    dropout_s = pass_s(device, (2 * e + 1) * scores, randoms=scores)
    return made_s + used_s + softmax_s + dropout_s


def _block(device: Device, b: int, s: int, h: int, a: int, e: int, ring: Ring) -> Layer:
    """A block on one of t devices. Each line of bytes is one kernel.

    A layer keeps its input where it is replayed, and all but the scores where only the core of attention is.
    """
    t = ring.size
    tokens = b * s
    heads = -(-a // t)
    width = h // a
    stream = b * s * h
    own = [-(-width * h // t) for width in (3, 1, 4)]
    shapes = [(tokens, own[0], h), (tokens, h, own[1]), (tokens, own[2], h), (tokens, h, own[2])]
    core_s = _core_s(device, b, s, heads, width, e)
    products_s, input_s, weight_s = _products_s(device, shapes, e)
    # Each of the two products of the core has two gradients, which are products of the same sizes.
    scores = b * heads * s * s
    back_s = 2 * product_s(device, s, width, s, b * heads, e)
    back_s += 2 * product_s(device, s, s, width, b * heads, e)
    forward = [
        *(2 * e * stream,) * 2,  # norms
        2 * e * 3 * stream / t,  # bias of queries, keys and values
        2 * e * stream / t,  # the heads side by side
        2 * e * 4 * stream / t,  # bias and GELU
    ]
    # Bias, dropout with its mask, and residual.
    dropped_s = 2 * pass_s(device, (3 * e + 1) * stream, randoms=stream)
    backward_input = [
        *(3 * e * stream,) * 4,  # norms; the gradients of residual and branch added up
        *((2 * e + 1) * stream,) * 2,  # dropout
        3 * e * 4 * stream / t,  # GELU
        2 * e * stream / t,  # the heads side by side
        *(2 * e * stream / t,) * 2,  # queries and keys scaled
        2 * e * 3 * stream / t,  # queries, keys and values side by side
        (2 * e + 1) * scores,  # dropout of the scores
        3 * e * scores,  # softmax
    ]
    backward_weight = [
        *(2 * e * stream,) * 2,  # norms
        *(e * width * stream for width in (3 / t, 1, 4 / t, 1)),  # biases
        *(3 * e * m * n / t for m, n in ((3 * h, h), (h, h), (4 * h, h), (4 * h, h))),  # added to those before
    ]
    wait_s = 2 * all_reduce_s(ring, e * stream)
    return Layer(
        "block",
        products_s + core_s + _passes_s(device, forward) + dropped_s + wait_s,
        input_s + back_s + _passes_s(device, backward_input) + wait_s,
        weight_s + _passes_s(device, backward_weight),
        output_bytes=e * stream,
        # The inputs of the norms and of the sharded products, and two masks, are whole: 10 of 34 bytes.
        saved_bytes=e * stream * (10 + 24 / t + 5 * a * s / (h * t)) / 2,
        weight_bytes=e * (12 * h * h + 13 * h) / t,
        # The inputs of the products, of widths 3h, h, 4h and h; the sums of the second and the fourth are whole.
        half_bytes=(7 / t + 2) * e * stream,
        input_bytes=e * stream,
        selective_bytes=e * stream * (10 + 24 / t) / 2,
        attention_s=core_s,
    )


def _head(device: Device, b: int, s: int, h: int, vocab: int, e: int, ring: Ring) -> Layer:
    """The projection to the vocabulary and its loss, which works on logits in 4 bytes.

    The projection shares the embedding's weights; a copy of them is counted where it runs.
    """
    tokens = b * s
    own = -(-vocab // ring.size)
    stream = e * b * s * h
    logits = tokens * own
    weights = e * vocab * h / ring.size
    forward_s, input_s, weight_s = _products_s(device, [(tokens, own, h)], e)
    # Conversion, maximum, difference, exponential, sum and quotient; then gradient and conversion.
    forward_s += _passes_s(device, [size * logits for size in (e + 4, 4, 8, 8, 4, 8)])
    input_s += _passes_s(device, [size * logits for size in (8, 4 + e)])
    return Layer(
        "head",
        forward_s + 3 * all_reduce_s(ring, 4 * tokens),
        input_s + all_reduce_s(ring, stream),
        weight_s + pass_s(device, 3 * weights),
        output_bytes=4 * logits,
        saved_bytes=stream + 4 * logits,
        weight_bytes=weights,
        grad_bytes=stream,
        half_bytes=4 * logits,
    )


def _at(sizes: dict[str, int], b: int, device: Device, e: int, ring: Ring) -> Profile:
    num, h, a, vocab, s = (sizes[name] for name in ("layers", "hidden", "heads", "vocab", "sequence"))
    stream = e * s * b * h
    table = e * vocab * h / ring.size
    # Look-up, positions and dropout; back, the rows' gradients are added to those of the table.
    looked_s = _passes_s(device, [2 * stream, 2 * stream]) + all_reduce_s(ring, stream)
    added_s = pass_s(device, 2 * stream) + pass_s(device, 3 * table)
    ids = 4 * b * s
    made = [Layer("embedding", looked_s, added_s, 0.0, stream, ids, table + e * s * h)]
    block = _block(device, b, s, h, a, e, ring)
    for index in range(num):
        made.append(msgspec.structs.replace(block, name=f"block{index}"))
    made.append(_head(device, b, s, h, vocab, e, ring))
    weights = sum(layer.weight_bytes for layer in made)
    named = [f"{key}={value}" for key, value in sizes.items() if _DEFAULTS.get(key) != value]
    # Bytes of a parameter: the norm of gradients (4), clipped (8); Adam reads 4 values and writes 3 (28); in mixed
    # precision also gradients to 4 bytes (6), unscaled (8), and the working copy (6).
    moved = 40
    if e < 4:
        moved = 60
    return Profile(
        "gpt:" + ",".join(named),
        b,
        tuple(made),
        device=f"{device.flops / 1e12:g} TFLOP/s at {device.efficiency:.0%}",
        source=f"{ARITHMETIC}, {e} bytes per element",
        optimizer_s=pass_s(device, moved * weights / e),
    )


def gpt_settings(text: str) -> dict[str, int]:
    """The sizes of "gpt:layers=96,hidden=12288,heads=96".

    Raises:
        ProfileError: a size is missing, unknown or not a whole number.
    """
    known = ("layers", "hidden", "heads", *_DEFAULTS)
    found: dict[str, int] = {}
    for part in text.removeprefix("gpt:").split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name not in known or not value.isdecimal():
            raise ProfileError(f"{text}: expected NAME=NUMBER with one of {', '.join(known)}; got {part!r}")
        found[name] = int(value)
    for name in known[:3]:
        if name not in found:
            raise ProfileError(f"{text}: expected {name}=…, as in gpt:layers=96,hidden=12288,heads=96")
    return found


def gpt_of(model: str) -> Gpt:
    """The sizes that PTD-P's arithmetic needs of a GPT by name; bytes of its elements change none of it."""
    sizes = gpt_settings(model)
    sizes.pop("bytes", None)
    return Gpt(**sizes)


def is_gpt(profile: Profile) -> bool:
    """Returns whether tensor parallelism applies to the profile: it is a GPT, with a block per layer."""
    return profile.model.startswith("gpt") and len(profile) >= 3
