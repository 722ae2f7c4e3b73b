"""PTD-P's arithmetic of a GPT: parameters, FLOP, fraction of the peak, days of training.

Legend: l layers, h hidden, V vocabulary, s sequence, B batch, P parameters, T tokens, n devices, X FLOP/s of one.
Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (SC 2021), section 5 and the
appendix.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def flops_per_iteration(gpt: Gpt, batch: int, recompute: bool = False) -> float:
    """F = 72·B·s·l·h²·(1 + s/(6h)) + 6·B·s·h·V; 96 in place of 72 with recompute (the head is never replayed).

    With recompute it is the paper's 96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)).
    """
    factor = 72
    if recompute:
        factor = 96
    tokens = batch * gpt.sequence
    blocks = factor * tokens * gpt.layers * gpt.hidden**2
    head = 6 * tokens * gpt.hidden * gpt.vocab
    return blocks * (1 + gpt.sequence / (6 * gpt.hidden)) + head


def mfu(gpt: Gpt, samples_per_s: float, devices: int, peak_flops: float, recompute: bool = False) -> float:
    """Fraction of the peak: forward and backward count once (MFU); with recompute the replay too (HFU)."""
    return samples_per_s * flops_per_iteration(gpt, 1, recompute) / (devices * peak_flops)


def training_days(parameters: float, tokens: float, devices: int, flops_per_device: float) -> float:
    """6·T·P/(n·X) seconds in days.

    >>> round(training_days(174.6e9, 300e9, 1024, 140e12 * 6 / 8))  # the paper counts a replay too: 8·T·P
    34
    """
    return 6 * tokens * parameters / (devices * flops_per_device) / _SECONDS_PER_DAY
