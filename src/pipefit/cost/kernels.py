"""Seconds of counted kernels on a device, by the law of `pipefit.cost.roofline`, and of a layer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipefit.cost.rings import Ring, all_gather_s, all_reduce_s, even
from pipefit.cost.roofline import flops_s, product_s
from pipefit.spec import Device, Layer
from pipefit.spec.counted import EXCHANGES, PRODUCTS, Kernel, LayerCount

ROWS = 128
"""Rows of the scores that a core takes at a time in fused attention: in the kernels of FlashAttention 2 and cuDNN."""

_ALONE = even(1, float("inf"), 0.0)


def kernels_s(device: Device, kernels: Iterable[Kernel], ring: Ring = _ALONE) -> float:
    """Seconds of some kernels.

    Args:
        device: one without `cores` reaches the rate of large products in attention, too.
        kernels: in any order.
        ring: of the devices that share a layer.
    """
    return sum(kernel.times * _kernel_s(device, kernel, ring) for kernel in kernels)


def _kernel_s(device: Device, kernel: Kernel, ring: Ring) -> float:
    sizes = kernel.sizes
    if kernel.kind in PRODUCTS:
        count, m, n, k, element_bytes = sizes
        if kernel.kind == "product8":
            device = msgspec.structs.replace(device, flops=device.fp8_flops)
        return product_s(device, m, n, k, count, element_bytes)
    if kernel.kind == "sum":
        return all_reduce_s(ring, sizes[0])
    if kernel.kind in EXCHANGES:
        return all_gather_s(ring, sizes[0])
    if kernel.kind == "pass":
        return flops_s(device, *sizes)
    _, flops, num_bytes, *last = sizes
    if not device.cores:
        return flops_s(device, flops, num_bytes)
    forward, backward = device.cudnn or device.flash
    share = forward
    if kernel.kind == "attention-back":
        share = backward
    return attention_s(device, share, flops, sum(last), num_bytes)


def attention_s(device: Device, share: float, flops: float, last: float, num_bytes: float) -> float:
    """Seconds of fused attention.

    A core takes some rows of the scores of a head at a time. At the end the cores wait for the one whose rows see the
    whole sequence, so that few heads on many cores are slow.

    Args:
        device: that runs it.
        share: of the rate of large products, which it reaches while all cores work.
        flops: in all.
        last: FLOP of the last rows of a sequence, which a core takes at a time.
        num_bytes: that it reads and writes.
    """
    reached = msgspec.structs.replace(device, efficiency=device.efficiency * share)
    return flops_s(reached, flops + device.cores * last, num_bytes)


def timed(name: str, count: LayerCount, device: Device, ring: Ring = _ALONE) -> Layer:
    """A counted layer with its seconds on a device."""
    return Layer(
        name,
        kernels_s(device, count.forward, ring),
        kernels_s(device, count.backward_input, ring),
        kernels_s(device, count.backward_weight, ring),
        **count.figures,
        attention_s=kernels_s(device, count.cores),
    )
