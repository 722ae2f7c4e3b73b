"""Seconds of an operation on a device by arithmetic: the one law of computed profiles.

An operation computes and moves bytes, and the slower of the two sets its time (Williams, Waterman and Patterson,
"Roofline", CACM 2009). Three effects make small operations slower than that, and the shape of a matrix product counts:

- tile quantisation: a product is computed in tiles, and one that sticks out by a row costs a whole tile;
- wave quantisation: the cores of the device compute one tile each, and the last wave of tiles may leave cores idle;
- a fixed cost per kernel.

Source of the quantisations: NVIDIA, "Matrix Multiplication Background User's Guide", sections 2 and 3.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from statistics import NormalDist

from msgspec.structs import replace

from pipefit.spec.topology import Device

# A tile advances along the shared dimension in steps of so many elements.
_STEP = 32
# Tiles are not made smaller than this.
_SMALLEST = 32


@lru_cache(maxsize=1 << 14)
def product_s(device: Device, m: int, n: int, k: int, count: int = 1, element_bytes: int = 2) -> float:
    """Seconds of `count` products of (m, k) and (k, n) matrices in one kernel.

    The inputs are read while tiles are computed; the cores write their outputs at the end of a wave, all at once, and
    nothing is computed meanwhile. Of a few tile sizes the fastest counts. Smaller tiles read the inputs more often, at
    the rate of the device's cache.

    >>> device = Device(flops=1e12, efficiency=1.0, cores=10, tile=(100, 100))
    >>> [round(product_s(device, m, 100, 3200) * 1e6) for m in (1000, 1001, 2000)]
    [640, 800, 1280]

    Args:
        device: without `cores` products are not quantised; without bandwidths bytes are free.
        m: rows of the output.
        n: columns of the output.
        k: the shared dimension.
        count: products of this shape.
        element_bytes: of inputs and outputs.
    """
    read = count * (m * k + k * n) * element_bytes
    written = count * m * n * element_bytes
    if not device.cores:
        flops = 2 * count * m * n * k
        return flops_s(device, flops, read + written)
    by_tile = [_waves_s(device, m, n, k, count, element_bytes, tile) for tile in _tiles(device.tile)]
    compute_s = min(by_tile)
    read_s = pass_s(device, read, kernel=False)
    return max(compute_s, read_s) + pass_s(device, written)


def pass_s(device: Device, num_bytes: float, kernel: bool = True, randoms: float = 0.0) -> float:
    """Seconds of a kernel that only moves bytes.

    Args:
        device: without a bandwidth or a rate of random numbers these are free.
        num_bytes: read and written.
        kernel: with the fixed cost of a kernel.
        randoms: random numbers that it makes, as dropout does.
    """
    bandwidth = device.memory_bandwidth_bytes_per_s
    moved_s = 0.0
    if bandwidth:
        moved_s = num_bytes / bandwidth
    if randoms and device.random_rate:
        moved_s = max(moved_s, randoms / device.random_rate)
    if kernel:
        moved_s += device.kernel_s
    return moved_s


def slowest_of(device: Device, count: int) -> Device:
    """The slowest of `count` devices of a kind, which sets the pace where all wait for each other.

    Rates are normally distributed: the least of n is expected Φ⁻¹((n − 3/8)/(n + 1/4)) standard deviations below the
    mean (Blom, "Statistical estimates and transformed beta-variables", 1958).

    >>> round(slowest_of(Device(flops=1e12, efficiency=0.8, spread=0.01), 1024).efficiency, 3)
    0.774
    """
    if not device.spread or count < 2:
        return device
    quantile = (count - 3 / 8) / (count + 1 / 4)
    below = NormalDist().inv_cdf(quantile)
    pace = 1 - device.spread * below
    return replace(device, efficiency=device.efficiency * pace)


def flops_s(device: Device, flops: float, num_bytes: float) -> float:
    """Seconds of a kernel of which only the FLOP and the bytes are known."""
    compute_s = flops / (device.flops * device.efficiency)
    moved_s = pass_s(device, num_bytes, kernel=False)
    return max(compute_s, moved_s) + device.kernel_s


def _waves_s(device: Device, m: int, n: int, k: int, count: int, element_bytes: int, tile: tuple[int, int]) -> float:
    rows, columns = tile
    tiles_down = -(-m // rows)
    tiles_across = -(-n // columns)
    tiles = count * tiles_down * tiles_across
    usable_flops = device.flops * device.efficiency
    compute_s = 2 * rows * columns * device.cores / usable_flops
    cache = device.cache_bandwidth_bytes_per_s or inf
    load_s = (rows + columns) * element_bytes * device.cores / cache
    # The last wave runs at the pace of a core; cores without a tile are idle.
    waves = -(-tiles // device.cores)
    steps = -(-k // _STEP) * _STEP
    return waves * steps * max(compute_s, load_s)


@lru_cache(maxsize=64)
def _tiles(largest: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The largest tile and its halves, a few times, each both upright and lying."""
    found = []
    rows, columns = largest
    while True:
        found += [(rows, columns), (columns, rows)]
        if rows >= columns:
            rows //= 2
        else:
            columns //= 2
        if min(rows, columns) < _SMALLEST:
            return tuple(dict.fromkeys(found))
