"""Parts of a transformer's block: seconds of its products, and bytes that its other kernels move and keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipefit.cost.roofline import pass_s, product_s
from pipefit.planner.transformer import Transformer
from pipefit.spec import Device

Shape = tuple[int, int, int]
"""Rows and columns of a product with weights, and the dimension that its factors share."""

FUSED = ("flash", "flash1", "cudnn")
"""Kinds of attention that are one kernel."""


class ProductTimes(NamedTuple):
    """Seconds of a product of inputs and weights: forward, gradients of the inputs, of the weights."""

    forward_s: float
    input_s: float
    weight_s: float


def product_times(device: Device, shape: Shape, e: int) -> ProductTimes:
    """Seconds of a product with weights in elements of so many bytes."""
    m, n, k = shape
    return ProductTimes(
        product_s(device, m, n, k, 1, e), product_s(device, m, k, n, 1, e), product_s(device, k, n, m, 1, e)
    )


def weights_s(device: Device, model: Transformer, shape: Shape) -> ProductTimes:
    """Seconds of a block's product with weights, in its type or in 8 bits."""
    e = model.bytes
    if not model.fp8:
        return product_times(device, shape, e)
    fast = msgspec.structs.replace(device, flops=device.fp8_flops)
    forward_s, input_s, weight_s = product_times(fast, shape, 1)
    # Inputs and gradients of outputs are converted, each also transposed, for the gradients of the weights.
    m, n, k = shape
    forward_s += pass_s(device, (e + 2) * m * k)
    input_s += pass_s(device, (e + 2) * m * n)
    return ProductTimes(forward_s, input_s, weight_s)


def seen_s(model: Transformer, sums_s: Iterable[float], beside: Iterable[float], t: int) -> float:
    """Seconds of sums over t devices next to which nothing is computed.

    Where they overlap, a product and the sum of its input or output go in t pieces at the same time, of which the first
    has nothing next to it.

    Args:
        model: whether they overlap.
        sums_s: seconds of each sum.
        beside: seconds of the product of each.
        t: devices.
    """
    hidden = 0.0
    if model.overlapped:
        hidden = 1 - 1 / t
    return sum(sum_s - hidden * min(sum_s, each_s) for sum_s, each_s in zip(sums_s, beside, strict=True))


def passes_s(device: Device, sizes: Iterable[float]) -> float:
    """Seconds of kernels that move so many bytes each."""
    return sum(pass_s(device, size) for size in sizes)


def norm(model: Transformer, stream: float) -> list[float]:
    """Bytes that each kernel of a norm moves."""
    e = model.bytes
    if model.fused_norms:
        return [2 * e * stream]
    # To 4 bytes, squared, mean, scaled, back, and times the weight.
    return [size * stream for size in (e + 4, 8, 4, 8, 4 + e, 2 * e)]


def norm_back(model: Transformer, stream: float) -> list[float]:
    """Bytes that each kernel of a norm's backward moves, without the gradient of its weight."""
    e = model.bytes
    if model.fused_norms:
        return [3 * e * stream]
    # Times the weight, to 4 bytes, and of two products, a sum, mean and square their gradients, added; and back.
    return [size * stream for size in (2 * e, e + 4, 12, 8, 4, 8, 8, 8, 12, 12, 4 + e)]


def kept_between(model: Transformer) -> float:
    """Elements for each of the stream that a block keeps outside its products: inputs of norms, masks."""
    kept = 2.0
    if model.dropout:
        kept += 1  # two masks of a byte
    if not model.fused_norms:
        kept += 4  # each norm keeps its input in 4 bytes and its output before the weight
    return kept


def kept_of_scores(model: Transformer, tokens: int) -> float:
    """Bytes that attention keeps for its backward in addition to its inputs and output."""
    e = model.bytes
    if model.attention in FUSED:
        return 4 * model.heads * tokens  # a sum for each row
    scores = model.heads * model.sequence * tokens
    kept = float(e)
    if model.dropout:
        kept += 1.5 * e
    if model.attention == "eager":
        kept += 4
    return kept * scores


def complex_rotations(model: Transformer, stream: float) -> list[float]:
    """Bytes of the kernels that rotate queries and keys, and repeat keys and values for every head; the same back.

    Rotations multiply complex numbers of 4-byte parts, for which `torch.compile` makes no kernels (torchtitan, issue
    15): to 4 bytes, times, and back.

    Args:
        model: that rotates.
        stream: elements of the queries.
    """
    e = model.bytes
    both = (1 + model.keys / model.heads) * stream
    kernels = [(e + 4) * both, 8 * both, (4 + e) * both]
    if model.keys < model.heads:
        kernels += [e * both] * 2
    return kernels


def passes_of_block(
    model: Transformer, stream: float, between: float, t: int
) -> tuple[list[float], list[float], list[float]]:
    """Bytes of each kernel of a block that is no product: forward, back to the input, and to the weights.

    Args:
        model: its sizes.
        stream: elements of the block's output.
        between: those of what is between the products, on each device.
        t: devices that share the block.
    """
    e = model.bytes
    h = model.hidden
    qkv = model.qkv / h
    up = model.up / h
    wide = model.wide / h
    forward = [*norm(model, between) * 2, 2 * e * stream / t]  # the heads side by side
    backward_input = [*norm_back(model, between) * 2, *(3 * e * between,) * 2]  # residual and branch added up
    backward_input.append(2 * e * stream / t)  # heads
    if not model.torchtitan:
        backward_input.append(2 * e * qkv * stream / t)  # queries, keys and values side by side
    backward_weight = [2 * e * between] * 2  # norms
    if not model.fused_norms:
        backward_weight += [2 * e * between] * 2  # a product, and its sum
    if model.bias:
        forward.append(2 * e * qkv * stream / t)
        backward_input += [2 * e * stream / t] * 2  # queries and keys scaled
        backward_weight += [e * width * stream for width in (qkv / t, 1, up / t, 1)]
    elif model.torchtitan:
        forward += complex_rotations(model, stream / t)
        backward_input += complex_rotations(model, stream / t)
    elif model.fused_passes:
        turned = 2 * e * (1 + model.keys / model.heads) * stream / t
        forward.append(turned)
        backward_input.append(turned)
    else:
        turned = (1 + model.keys / model.heads) * stream / t
        # Times cosine; a half negated, halves exchanged, times sine; added. Back, halves come out of zeros.
        forward += [size * e * turned for size in (2, 1, 2, 2, 3)]
        backward_input += [size * e * turned for size in (2, 1, 1.5, 1.5, 3, 2, 3)]
    if model.gated and model.fused_passes:
        forward.append(3 * e * wide * stream / t)
        backward_input.append(5 * e * wide * stream / t)
    elif model.gated:
        forward += [2 * e * wide * stream / t, 3 * e * wide * stream / t]  # SiLU, and its product with the other half
        backward_input += [5 * e * wide * stream / t, 3 * e * wide * stream / t]
    else:
        forward.append(2 * e * wide * stream / t)  # bias and GELU
        backward_input.append(3 * e * wide * stream / t)
    return forward, backward_input, backward_weight
