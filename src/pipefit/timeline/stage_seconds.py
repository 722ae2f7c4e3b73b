"""Seconds of a rank's stages per micro-batch over some passes, without what disturbed single ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import BACKWARD_OPS, Op

_COUNTED = {Op.FWD, *BACKWARD_OPS}

_ERROR = 1.86
"""Of a normal distribution, the standard error of a median of n values times √n over their median deviation."""


class Middle(NamedTuple):
    """Several passes in one figure for each stage.

    Attributes:
        seconds: of each stage, the median.
        noise: relative standard error of these medians, the largest.
    """

    seconds: dict[int, float]
    noise: float


def stage_seconds(
    instructions: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]
) -> dict[int, float]:
    """The seconds of a forward and a backward of each stage, by the medians over the micro-batches of a pass.

    The halves of a backward count together; a replay before it does not.
    """
    times = defaultdict(list)
    for i, start, end in zip(instructions, starts, ends, strict=True):
        if i.op in _COUNTED:
            seconds = end - start
            times[i.stage, i.op].append(seconds)
    found: dict[int, float] = defaultdict(float)
    for (stage, _), each in times.items():
        found[stage] += median(each)
    return dict(found)


def middle(passes: Sequence[Mapping[int, float]]) -> Middle:
    """The medians over passes."""
    seconds = {}
    noise = 0.0
    for stage in passes[0]:
        each = [one[stage] for one in passes]
        mid = median(each)
        seconds[stage] = mid
        deviation = median(abs(value / mid - 1) for value in each)
        error = _ERROR * deviation / math.sqrt(len(each))
        noise = max(noise, error)
    return Middle(seconds, noise)
