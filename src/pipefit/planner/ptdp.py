"""PTD-P's estimators: parameters, FLOP, communication, memory, throughput, days.

Legend: l layers, h hidden, a heads, V vocabulary, s sequence, B global batch, b micro-batch, p depth, v chunks,
t tensor width, d data-parallel width, n = p·t·d devices.
Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (SC 2021), sections 2, 3, 5
and the appendix; Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), table 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.errors import PlanError, nearest

__all__ = [
    "Gpt",
    "activation_bytes_per_layer",
    "best_microbatch",
    "bubble_over_ideal",
    "data_bytes",
    "flops_per_iteration",
    "mfu",
    "num_parameters",
    "pipeline_bytes",
    "state_bytes_per_parameter",
    "tensor_bytes_per_layer",
    "throughput_samples_per_s",
    "training_days",
]

_SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Gpt:
    """The sizes of a GPT."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    sequence: int = 2048


def num_parameters(gpt: Gpt) -> float:
    """P = 12·l·h²·(1 + 13/(12h) + (V+s)/(12·l·h)).

    >>> round(num_parameters(Gpt(96, 12288, 96)) / 1e9, 1)
    174.6
    """
    width = 12 * gpt.layers * gpt.hidden
    return width * gpt.hidden * (1 + 13 / (12 * gpt.hidden) + (gpt.vocab + gpt.sequence) / width)


def flops_per_iteration(gpt: Gpt, batch: int, recompute: bool = True) -> float:
    """F = 96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)); 72 in place of 96 without recompute.

    Without recompute the head's share is kept as it is (it is never replayed).
    """
    blocks = (96 if recompute else 72) * batch * gpt.sequence * gpt.layers * gpt.hidden**2
    head = 6 * batch * gpt.sequence * gpt.hidden * gpt.vocab
    return blocks * (1 + gpt.sequence / (6 * gpt.hidden)) + head


def throughput_samples_per_s(gpt: Gpt, devices: int, flops_per_device: float, recompute: bool = True) -> float:
    """Sequences per second of devices that reach so many FLOP/s each."""
    return devices * flops_per_device / flops_per_iteration(gpt, 1, recompute)


def mfu(
    gpt: Gpt,
    samples_per_s: float,
    devices: int,
    peak_flops: float,
    convention: Literal["model", "hardware"] = "model",
    recompute: bool = True,
) -> float:
    """Fraction of the peak.

    Args:
        gpt: sizes.
        samples_per_s: throughput.
        devices: how many.
        peak_flops: of one.
        convention: "model" (MFU) counts forward and backward once, 72 in F; "hardware" (HFU) counts the replay too, as
            the published table does.
        recompute: whether forwards were replayed; only "hardware" asks.
    """
    counted = flops_per_iteration(gpt, 1, recompute=convention == "hardware" and recompute)
    return samples_per_s * counted / (devices * peak_flops)


def training_days(
    parameters: float, tokens: float, devices: int, flops_per_device: float, recompute: bool = True
) -> float:
    """8·T·P/(n·X) seconds in days; 6 in place of 8 without recompute.

    >>> round(training_days(174.6e9, 300e9, 1024, 140e12)), round(training_days(1008e9, 450e9, 3072, 163e12))
    (34, 84)
    """
    return (8 if recompute else 6) * tokens * parameters / (devices * flops_per_device) / _SECONDS_PER_DAY


def bubble_over_ideal(depth: int, microbatches: int, chunks: int = 1) -> float:
    """(p − 1)/(v·m): idle time over ideal time, m micro-batches per pipeline.

    >>> bubble_over_ideal(8, 64), bubble_over_ideal(8, 64, 2)
    (0.109375, 0.0546875)
    """
    return (depth - 1) / (chunks * microbatches)


def pipeline_bytes(
    gpt: Gpt, microbatch: int, *, chunks: int = 1, tensor: int = 1, scatter_gather: bool = True, element_bytes: int = 2
) -> float:
    """What a device sends across one boundary, in one direction, per micro-batch: b·s·h elements, ×v, ÷t.

    The division by t is the scatter/gather optimisation; it needs an all-gather of the rest inside the server.
    """
    return microbatch * gpt.sequence * gpt.hidden * element_bytes * chunks / (tensor if scatter_gather else 1)


def tensor_bytes_per_layer(gpt: Gpt, microbatch: int, tensor: int, element_bytes: int = 2) -> float:
    """8·b·s·h·(t−1)/t elements per layer and micro-batch: four all-reduces, two forward and two backward."""
    return 8 * microbatch * gpt.sequence * gpt.hidden * (tensor - 1) / tensor * element_bytes


def data_bytes(gradient_bytes: float, width: int) -> float:
    """2(d−1)/d of the gradients of a device, per batch: a ring all-reduce."""
    return 2 * (width - 1) / width * gradient_bytes


_ACTIVATIONS = ("none", "selective", "full")


def activation_bytes_per_layer(
    gpt: Gpt, microbatch: int, tensor: int = 1, *, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes a block keeps per micro-batch, at 2 bytes per element.

    none: s·b·h(34 + 5as/h); with t: s·b·h(10 + 24/t + 5as/(ht)); with sequence parallelism: s·b·h/t(34 + 5as/h).
    selective (attention's scores are replayed): 34·s·b·h/t, without sequence parallelism s·b·h(10 + 24/t).
    full: the block's input, 2·s·b·h, ÷t with sequence parallelism.

    Raises:
        PlanError: another kind of recompute.
    """
    if recompute not in _ACTIVATIONS:
        raise PlanError(f"recompute: {nearest(recompute, _ACTIVATIONS)} Got {recompute!r}")
    stream = gpt.sequence * microbatch * gpt.hidden
    scores = 5 * gpt.heads * gpt.sequence / gpt.hidden if recompute == "none" else 0.0
    if recompute == "full":
        return 2.0 * stream / (tensor if sequence_parallel else 1)
    if sequence_parallel:
        return stream / tensor * (34 + scores)
    return stream * (10 + 24 / tensor + scores / tensor)


_STATES = {"fp32": (4, 4, 8), "mixed": (2, 2, 12), "mixed-fp32-grads": (2, 4, 12)}


def state_bytes_per_parameter(precision: str = "mixed", sharded_over: int = 1) -> float:
    """Weights, gradients and Adam's states: 16 (fp32; mixed with 2-byte gradients) or 18 bytes (4-byte gradients).

    The optimizer's part (8, or 12 with the master copy) is divided by d when it is sharded.

    >>> state_bytes_per_parameter(), state_bytes_per_parameter("mixed-fp32-grads", 8)
    (16.0, 7.5)

    Raises:
        PlanError: unknown precision.
    """
    if precision not in _STATES:
        raise PlanError(f"unknown precision {precision!r}; {nearest(precision, _STATES)}")
    weight, gradient, optimizer = _STATES[precision]
    return weight + gradient + optimizer / sharded_over


def best_microbatch(
    batch: int, data: int, depth: int, forward_s: dict[int, float], backward_s: dict[int, float]
) -> tuple[int, dict[int, float]]:
    """The micro-batch with the least batch time (B/(d·b) + p − 1)(t_f(b) + t_b(b)), and the time of each.

    >>> best_microbatch(512, 1, 8, {1: 1.0, 2: 1.8, 4: 3.5}, {1: 2.0, 2: 3.4, 4: 6.9})[0]
    2

    Args:
        batch: B.
        data: d.
        depth: p.
        forward_s: of one stage, by b; only b with B divisible by d·b are looked at.
        backward_s: likewise.

    Raises:
        PlanError: no b divides.
    """
    times = {
        b: (batch // (data * b) + depth - 1) * (forward_s[b] + backward_s[b])
        for b in sorted(forward_s)
        if batch % (data * b) == 0
    }
    if not times:
        raise PlanError(f"no micro-batch of {sorted(forward_s)} divides the batch {batch} over {data} copies")
    return min(times, key=lambda b: (times[b], b)), times
