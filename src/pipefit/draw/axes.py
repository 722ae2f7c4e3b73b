"""Ticks and numbers of axes."""

from __future__ import annotations

import math


def nice_ticks(high: float, target: int = 8) -> list[float]:
    """Round numbers from 0 to `high`, about `target` of them.

    >>> nice_ticks(33, 6)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if not high > 0:
        return [0.0]
    raw = high / max(target, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = min(steps, key=lambda step: abs(step - raw))
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(last + 1)]


def label_number(value: float) -> str:
    """A number without superfluous digits.

    >>> label_number(33.0), label_number(0.30000000000000004), label_number(12500)
    ('33', '0.3', '12,500')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    if text in ("-0", "0"):
        return "0"
    return text


def time_scale(span_s: float, unit: str) -> tuple[float, str]:
    """The factor of times and their unit, for a picture as long as `span_s`.

    >>> time_scale(0.25, "s"), time_scale(33.0, "")
    ((1000.0, 'ms'), (1.0, ''))
    """
    if not unit:
        return 1.0, ""
    for limit, factor, name in ((2e-6, 1e9, "ns"), (2e-3, 1e6, "µs"), (2.0, 1e3, "ms")):
        if span_s < limit:
            return factor, name
    return 1.0, "s"
