"""Profiles of transformers by arithmetic, without torch: every operation of their layers through the roofline.

Legend: b micro-batch, s sequence, h hidden, a heads, f width of the feed-forward, V vocabulary, t tensor width, e bytes
of an element.
Sources: Narayanan et al. (SC 2021), section 4 (fused operations) and the appendix (FLOP); Korthikanti et al. 2022,
section 4 (bytes kept; sequence parallelism); Dao, "FlashAttention-2" 2023, figures 4 to 6 (rates of attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import msgspec

from pipefit.cost.kernels import ROWS, attention_s, timed
from pipefit.cost.rings import Ring, all_gather_s, all_reduce_s, even, ring_of
from pipefit.cost.roofline import pass_s, product_s, slowest_of
from pipefit.cost.tensor import tensor_shard
from pipefit.errors import ProfileError
from pipefit.planner import torchtitan as titan
from pipefit.planner.block_parts import (
    FUSED,
    kept_between,
    kept_of_scores,
    passes_of_block,
    passes_s,
    product_times,
    seen_s,
    weights_s,
)
from pipefit.planner.transformer import Transformer, is_transformer, text_of, transformer_of
from pipefit.spec import Device, Layer, Profile, Topology
from pipefit.spec.counted import Counted, SharedWeights
from pipefit.spec.profile import ARITHMETIC

_FLASH1 = 0.47, 0.36
"""Shares of the rate of a large product that FlashAttention 1 reaches on an A100, forward and backward.

Dao 2023, section 1: 30 to 50 % and 25 to 35 % of the peak: the middle.
"""
_ALIGNED = 16
"""Bytes of which rows must be multiples for tensor cores (NVIDIA, "Matrix multiplication background", requirements)."""
_WITHOUT_TENSOR_CORES = 16
"""The rate with tensor cores over the rate without, of an A100 by its data sheet: 312 and 19.5 TFLOP/s."""


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
    """A GPT as a chain: embedding, `layers` blocks, head; see `transformer_profile`.

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
        device: as of `transformer_profile`.
        bytes: of an element of weights and activations: 2 (Adam then has a master copy), or 4.
        tensor: as of `transformer_profile`.
        topology: as of `transformer_profile`.

    Raises:
        ProfileError: a size below 1, other bytes, heads that do not divide the hidden size, or a device without
            FLOP/s.
    """
    model = Transformer(layers, hidden, heads, vocab, sequence, bytes=bytes)
    return transformer_profile(model, microbatch, device, tensor=tensor, topology=topology)


def transformer_profile(
    model: Transformer,
    microbatch: int | Sequence[int] = 1,
    device: Device | None = None,
    *,
    tensor: int = 1,
    topology: Topology | None = None,
) -> Profile:
    """A transformer as a chain: embedding, blocks, head.

    A block's forward takes the FLOP of its products with weights, and 4bs²h in attention, of which FlashAttention
    leaves out the half above the diagonal; its backward twice that. The head takes 2bshV. Norms, attention's softmax,
    activations, rotations, dropout and residual move bytes (`_block`). With the scores of attention kept, a block of a
    GPT keeps sbh(34 + 5as/h) bytes from forward to backward (at 2 bytes per element). The head keeps its input and the
    logits in 4 bytes.

    Args:
        model: its sizes.
        microbatch: b, or several sizes.
        device: with `flops`, and for more than the FLOP of the products its other figures.
        tensor: t: the profile is that of one of so many devices that share every layer, with their all-reduces.
        topology: whose innermost devices share a layer, and whose slowest device sets the pace; None: all-reduces are
            free, and devices alike.

    Raises:
        ProfileError: a device without FLOP/s, or heads or a feed-forward that t devices cannot share.
    """
    if not model.splits(tensor):
        raise ProfileError(f"tensor width {tensor}: expected a divisor of {model.keys} heads of keys, and of ffn")
    device = (device or Device(flops=312e12)).for_elements(model.bytes)
    made_for = _with_flops(device, bool(model.fp8))
    if isinstance(microbatch, int):
        many = [microbatch]
    else:
        many = list(microbatch)
    pace, ring = _shared(device, tensor, topology)
    found = [msgspec.structs.replace(_at(model, b, pace, ring), computed_for=made_for) for b in many]
    return found[0].with_others(found[1:])


def profile_at(profile: Profile, microbatch: int, tensor: int, topology: Topology) -> Profile:
    """The profile of one of t devices that share every layer, at a micro-batch size.

    A profile by arithmetic, or of counted layers, is computed again, with the shapes of these shards; any other is
    scaled.
    """
    device = profile.computed_for
    if device is None:
        return tensor_shard(profile.at(microbatch), tensor, topology)
    if profile.counted is not None:
        return counted_profile(profile.counted, profile.model, microbatch, device, tensor=tensor, topology=topology)
    model = transformer_of(profile.model)
    return transformer_profile(model, microbatch, device, topology=topology, tensor=tensor)


def counted_profile(
    counted: Counted,
    name: str,
    microbatch: int,
    device: Device,
    *,
    tensor: int = 1,
    topology: Topology | None = None,
) -> Profile:
    """The profile of counted layers on a device.

    Args:
        counted: by `pipefit.profiling.count_model`.
        name: of the model.
        microbatch: samples of a micro-batch.
        device: as of `transformer_profile`.
        tensor: as of `transformer_profile`.
        topology: as of `transformer_profile`.

    Raises:
        ProfileError: a device without FLOP/s, or a tensor width that was not counted.
    """
    device = device.for_elements(counted.element_bytes)
    made_for = _with_flops(device, counted.needs_fp8)
    pace, ring = _shared(device, tensor, topology)
    layers = []
    for own, count in zip(counted.names, counted.at(microbatch, tensor), strict=True):
        layers.append(timed(own, count, pace, ring))
    shared = counted.shared[counted.widths.index(tensor)]
    trained = sum(layer.wgrad_bytes for layer in layers) - sum(one.trained_bytes for one in shared)
    return Profile(
        name,
        microbatch,
        tuple(layers),
        device=f"{device.flops / 1e12:g} TFLOP/s at {device.efficiency:.0%}",
        source=f"counted on the model's modules, {counted.element_bytes} bytes per element",
        optimizer_s=_optimizer_s(pace, trained, counted.element_bytes),
        computed_for=made_for,
        element_bytes=counted.element_bytes,
        counted=counted,
        shared=shared,
    )


def _with_flops(device: Device, needs_fp8: bool) -> Device:
    """A device for which profiles can be computed, without its memory."""
    if device.flops <= 0:
        raise ProfileError('device.flops: computed profiles need it; give it in the topology: flops = "312 TFLOP/s"')
    if needs_fp8 and not device.fp8_flops:
        raise ProfileError('device.fp8_flops: fp8 needs it; give it in the topology: fp8_flops = "1979 TFLOP/s"')
    return msgspec.structs.replace(device, memory_bytes=0.0)


def _shared(device: Device, tensor: int, topology: Topology | None) -> tuple[Device, Ring]:
    """The device that sets the pace, and the links of those that share a layer."""
    if topology is None:
        return device, even(tensor, float("inf"), 0.0)
    return slowest_of(device, topology.num_devices), ring_of(topology, range(tensor))


def _optimizer_s(device: Device, weight_bytes: float, e: int) -> float:
    """Seconds of a step, from the bytes that move for each parameter.

    The norm of gradients (4), clipped (8); Adam reads 4 values and writes 3 (28); in mixed precision also gradients to
    4 bytes (6), unscaled (8), and the working copy (6).
    """
    moved = 40
    if e < 4:
        moved = 60
    return pass_s(device, moved * weight_bytes / e)


def _added_s(device: Device, model: Transformer, count: float) -> float:
    """Seconds of adding the gradients of so many weights to those of the micro-batches before."""
    e = model.bytes
    wide = model.added_bytes
    if not wide:
        return pass_s(device, 3 * e * count)
    return pass_s(device, (e + wide) * count) + pass_s(device, 3 * wide * count)


def _core_s(device: Device, model: Transformer, b: int, heads: int) -> tuple[float, float]:
    """Seconds of the core of attention of some heads, forward and backward."""
    e = model.bytes
    s = model.sequence
    width = model.hidden // model.heads
    scores = b * heads * s * s
    if model.attention in FUSED:
        return _fused_core_s(device, model, 2 * scores * width, 4 * e * b * heads * s * width)
    if width * e % _ALIGNED:
        device = msgspec.structs.replace(device, efficiency=device.efficiency / _WITHOUT_TENSOR_CORES)
    made_s = product_s(device, s, s, width, b * heads, e)
    used_s = product_s(device, s, width, s, b * heads, e)
    # Each of the two products has two gradients, which are products of the same sizes.
    back_s = 2 * used_s + 2 * made_s
    kernels = [2 * e * scores]  # scale, mask and softmax
    back = [3 * e * scores]
    if model.attention == "eager":
        kernels = [size * scores for size in (2 * e, 2 * e + 1, e + 4, 8, 4 + e)]
        back = [size * scores for size in (4 + e, 12, 4 + e, 2 * e + 1, 2 * e)]
    dropped_s = 0.0
    if model.dropout:
        dropped_s = pass_s(device, (2 * e + 1) * scores, randoms=scores)
        back.append((2 * e + 1) * scores)
    return made_s + used_s + passes_s(device, kernels) + dropped_s, back_s + passes_s(device, back)


def _fused_core_s(device: Device, model: Transformer, flops: float, num_bytes: float) -> tuple[float, float]:
    """Seconds of fused attention, forward and backward, which makes the scores again: five products in place of two.

    Args:
        device: that runs it.
        model: whose attention it is.
        flops: of the forward, without the half above the diagonal.
        num_bytes: of queries, keys, values and output.
    """
    last = 4.0 * min(ROWS, model.sequence) * model.sequence * model.hidden / model.heads
    forward, backward = device.flash
    if model.attention == "cudnn":
        forward, backward = device.cudnn or device.flash
    elif model.attention == "flash1":
        forward, backward = _FLASH1
        last = 0.0  # a core takes whole heads
    forward_s = attention_s(device, forward, flops, last, num_bytes)
    return forward_s, attention_s(device, backward, 2.5 * flops, 2.5 * last, 2 * num_bytes)


def _block(device: Device, model: Transformer, b: int, ring: Ring) -> Layer:
    """A block on one of t devices. Each line of bytes is one kernel.

    A layer keeps its input where it is replayed, and all but the scores where only the core of attention is.
    """
    t = ring.size
    e = model.bytes
    s = model.sequence
    h = model.hidden
    tokens = b * s
    heads = -(-model.heads // t)
    stream = tokens * h
    # Widths in multiples of h.
    qkv = model.qkv / h
    up = model.up / h
    wide = model.wide / h
    own = [-(-width // t) for width in (model.qkv, h, model.up, model.wide)]
    shapes = [(tokens, own[0], h), (tokens, h, own[1]), (tokens, own[2], h), (tokens, h, own[3])]
    core_s, core_back_s = _core_s(device, model, b, heads)
    made, inputs, weights = zip(*(weights_s(device, model, shape) for shape in shapes), strict=True)
    between = stream / t if model.sequence_parallel else stream
    forward, backward_input, backward_weight = passes_of_block(model, stream, between, t)
    if model.dropout:
        joined_s = 2 * pass_s(device, (3 * e + 1) * between, randoms=between)  # bias, dropout, residual
        backward_input += [(2 * e + 1) * between] * 2
    else:
        joined_s = 2 * pass_s(device, 3 * e * between)
    added_s = sum(_added_s(device, model, m * h / t) for m in (model.qkv, h, model.up, model.wide))
    half_s = all_reduce_s(ring, e * stream) / 2
    # Inputs of the first and the third product are gathered, outputs of the others scattered; back the other way round.
    forward_s = sum(made) + seen_s(model, (half_s,) * 4, made, t)
    backward_s = seen_s(model, (model.sums * half_s / 2,) * 4, map(add, inputs, weights), t)
    input_s = sum(inputs) + backward_s
    weight_s = sum(weights)
    whole = stream if model.gathered else between  # outputs of the norms, of the two products after them
    widths = qkv + 1 + up + wide
    if model.gated and not model.fused_passes:
        widths += wide  # the output of SiLU
    kept = e * (kept_between(model) * between + 2 * whole + widths * stream / t)
    vectors = 2 * h
    if model.bias:
        vectors = 4 * h + model.qkv + h + model.up + h
    replay_s = None
    part_s = core_s
    part = kept
    if model.torchtitan:
        forward_s, input_s, weight_s, whole_s, part_s = titan.product_times(device, model, tokens, ring)
        others_s = passes_s(device, forward) + joined_s / 2
        replay_s = whole_s + core_s + others_s
        part_s += others_s
        part = titan.kept_bytes(model, tokens, t, between)
    return Layer(
        "block",
        forward_s + core_s + passes_s(device, forward) + joined_s,
        input_s + core_back_s + passes_s(device, backward_input),
        weight_s + passes_s(device, backward_weight) + added_s,
        output_bytes=e * stream,
        saved_bytes=kept + kept_of_scores(model, tokens) / t,
        weight_bytes=e * (model.matrices + vectors) / t,
        # The inputs of the products, of the widths of their outputs; the sums of the second and the fourth are whole.
        half_bytes=((qkv + up) / t + 2) * e * stream,
        input_bytes=e * between,
        selective_bytes=part,
        attention_s=part_s,
        replay_s=replay_s,
    )


def _head(device: Device, model: Transformer, b: int, ring: Ring) -> Layer:
    """The projection to the vocabulary, and its loss on logits in 4 bytes, unless these are whole (`_whole_loss_s`).

    A projection that shares the embedding's weights has a copy of them, which is counted where it runs.
    """
    e = model.bytes
    h = model.hidden
    vocab = model.vocab
    tokens = b * model.sequence
    own = -(-vocab // ring.size)
    stream = e * tokens * h
    logits = tokens * own
    weights = e * vocab * h / ring.size
    forward_s, input_s, weight_s = product_times(device, (tokens, own, h), e)
    kept_bytes = stream + 4.0 * logits
    replayed_bytes = None
    if model.fused_loss:
        # Conversion, maximum, difference, exponential, sum and quotient; then gradient and conversion.
        forward_s += passes_s(device, [size * logits for size in (e + 4, 4, 8, 8, 4, 8)])
        forward_s += 3 * all_reduce_s(ring, 4 * tokens)
        input_s += passes_s(device, [size * logits for size in (8, 4 + e)])
    else:
        logits = tokens * vocab
        forward_s += all_gather_s(ring, e * logits)
        if ring.size > 1:
            # NCCL gathers into one tensor; torch copies it into a list of tensors, which are then joined.
            forward_s += 2 * pass_s(device, 2 * e * logits)
        kept_bytes = stream + (e + 4 + 4 + 4) * logits  # the logits, in 4 bytes, their softmax, and its gradient
        # Where layers are replayed, so is the projection, but not the loss, which keeps as much.
        replayed_bytes = kept_bytes
    return Layer(
        "head",
        forward_s,
        input_s + all_reduce_s(ring, stream),
        weight_s + _added_s(device, model, weights / e),
        output_bytes=4 * logits,
        saved_bytes=kept_bytes,
        weight_bytes=weights,
        grad_bytes=stream,
        half_bytes=4 * logits,
        input_bytes=replayed_bytes,
    )


def _whole_loss_s(device: Device, model: Transformer, tokens: int) -> float:
    """Seconds of a loss on whole logits, forward and backward, which each of t devices repeats."""
    if model.fused_loss:
        return 0.0
    # Conversion; logarithm of softmax, which reads for maximum, sum and result; the largest logits, for an
    # accuracy. Then zeros, the gradient of softmax, and conversion.
    e = model.bytes
    return passes_s(device, [size * tokens * model.vocab for size in (e + 4, 16, 4, 4, 16, 4 + e)])


def _at(model: Transformer, b: int, device: Device, ring: Ring) -> Profile:
    e = model.bytes
    h = model.hidden
    vocab = model.vocab
    s = model.sequence
    stream = e * s * b * h
    table = e * vocab * h / ring.size
    # Look-up, positions and dropout; back, the rows' gradients are added to those of the table.
    looked_s = 2 * pass_s(device, 2 * stream) + all_reduce_s(ring, stream)
    added_s = pass_s(device, 2 * stream) + _added_s(device, model, table / e)
    ids = 4 * b * s
    positions = e * s * h if model.bias else 0
    made = [Layer("embedding", looked_s, added_s, 0.0, stream, ids, table + positions)]
    block = _block(device, model, b, ring)
    made += [msgspec.structs.replace(block, name=f"block{index}") for index in range(model.layers)]
    made.append(_head(device, model, b, ring))
    if model.torchtitan:
        made = [titan.with_copies(layer, device, model) for layer in made]
    shared: tuple[SharedWeights, ...] = ()
    if model.tied:
        shared = (SharedWeights((0, len(made) - 1), table, table),)
    weights = sum(layer.weight_bytes for layer in made) - sum(one.weight_bytes for one in shared)
    return Profile(
        text_of(model),
        b,
        tuple(made),
        device=f"{device.flops / 1e12:g} TFLOP/s at {device.efficiency:.0%}",
        source=f"{ARITHMETIC}, {e} bytes per element",
        loss_s=_whole_loss_s(device, model, b * s),
        optimizer_s=_optimizer_s(device, weights, e),
        element_bytes=e,
        summed_per_byte=(model.summed_bytes or e) / e,
        added_per_byte=model.added_bytes / e,
        overlapped=bool(model.overlapped),
        shared=shared,
    )


def num_blocks(profile: Profile) -> int:
    """The blocks of a transformer, to which tensor parallelism applies; 0: the profile is of another model.

    It is given by its sizes, or counted, or the built-in GPT, measured; embedding and head are the two other layers.
    """
    if profile.counted is not None or is_transformer(profile.model) or profile.model.startswith("gpt"):
        return max(len(profile) - 2, 0)
    return 0
