"""Profiles of GPTs by arithmetic, without torch: the layer counts of Megatron-LM (Narayanan et al., SC 2021).

Legend: b micro-batch, s sequence, h hidden, a heads, l layers, V vocabulary, t tensor width.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import ProfileError
from pipefit.spec import Device, Layer, Profile
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
    overhead_s: float = 0.0,
) -> Profile:
    """A GPT as a chain: embedding, `layers` blocks, head.

    A block's forward takes 24bsh² + 4bs²h FLOP, its backward twice that (half for the input, half for the weights); the
    head 2bshV. Bytes kept from forward to backward: sbh(34 + 5as/h) in a block (that is at 2 bytes per element), which
    keeps the scores of attention. The head keeps its input and the logits in 4 bytes. Source: Narayanan et al. 2021,
    appendix; Korthikanti et al. 2022, section 4.

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
        device: with `flops` and `efficiency`.
        element_bytes: of weights and activations.
        overhead_s: fixed seconds of every pass through a layer, at any size: they make small micro-batches slow.

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
    found = [_at(sizes, b, device, element_bytes, overhead_s) for b in many]
    return found[0].with_others(found[1:]) if len(found) > 1 else found[0]


def _at(sizes: dict[str, int], b: int, device: Device, element_bytes: int, overhead_s: float) -> Profile:
    num, h, a, vocab, s = (sizes[name] for name in ("layers", "hidden", "heads", "vocab", "sequence"))
    rate = device.flops * device.efficiency
    scale = element_bytes / 2
    stream = element_bytes * s * b * h
    block_s = (24 * b * s * h * h + 4 * b * s * s * h) / rate + overhead_s
    head_s = 2 * b * s * h * vocab / rate + overhead_s
    block_saved = s * b * h * (34 + 5 * a * s / h) * scale
    block_weights = element_bytes * (12 * h * h + 13 * h)
    logits = 4 * b * s * vocab
    tokens = 4 * b * s  # ids of 4 bytes
    # The inputs of the products, of widths 3h, h, 4h and h.
    halves = 9 * stream
    made = [Layer("embedding", overhead_s, overhead_s, 0.0, stream, tokens, element_bytes * (vocab + s) * h)]
    made += [
        Layer(
            f"block{i}",
            block_s,
            block_s,
            block_s,
            stream,
            block_saved,
            block_weights,
            half_bytes=halves,
            # Replayed from its input, or without the scores of attention: their products are 4bs²h FLOP.
            input_bytes=stream,
            selective_bytes=34 * s * b * h * scale,
            attention_s=4 * b * s * s * h / rate,
        )
        for i in range(num)
    ]
    # The projection to the vocabulary shares the embedding's weights; a copy of them is counted where it runs.
    head_weights = element_bytes * vocab * h
    made.append(Layer("head", head_s, head_s, head_s, logits, stream + logits, head_weights, stream, half_bytes=logits))
    weights = sum(layer.weight_bytes for layer in made)
    # Adam in mixed precision reads and writes 7 passes of 4 bytes and writes the working copy.
    memory_rate = device.memory_bandwidth_bytes_per_s
    optimizer_s = weights / element_bytes * 30 / memory_rate if memory_rate else 0.0
    name = "gpt:" + ",".join(f"{key}={value}" for key, value in sizes.items() if _DEFAULTS.get(key) != value)
    return Profile(
        name,
        b,
        tuple(made),
        device=f"{device.flops / 1e12:g} TFLOP/s at {device.efficiency:.0%}",
        source=f"{ARITHMETIC}, {element_bytes} bytes per element",
        optimizer_s=optimizer_s,
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
