"""Seconds of counted kernels on a device, by the law of `pipefit.cost.roofline`, and of a layer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipefit.cost.rings import Ring, all_gather_s, all_reduce_s, even
from pipefit.cost.roofline import flops_s, product_s
from pipefit.spec import Device, Layer
from pipefit.spec.counted import EXCHANGES, PRODUCTS, Kernel, LayerCount

FLASH = {"attention": 0.68, "attention-back": 0.60}
"""Shares of the rate of a large product that FlashAttention 2 reaches on an A100; Dao 2023, figures 4 to 6."""

_ALONE = even(1, float("inf"), 0.0)


def kernels_s(device: Device, kernels: Iterable[Kernel], ring: Ring = _ALONE) -> float:
    """Seconds of some kernels.

    Args:
        device: one without `cores` reaches the rate of large products in attention, too.
        kernels: in any order.
        ring: of the devices that share a layer.
    """
    return sum(_kernel_s(device, kernel, ring) for kernel in kernels)


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
    _, flops, num_bytes = sizes
    if device.cores:
        device = msgspec.structs.replace(device, efficiency=device.efficiency * FLASH[kernel.kind])
    return flops_s(device, flops, num_bytes)


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
