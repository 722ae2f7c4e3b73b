"""How fast the machine is at the moment: one micro-batch through the whole model, on every rank at once.

Other programs and other guests of a shared server make a machine now faster, now slower, by as much as twice, and what
is compared with a prediction must not have run at another speed than what the prediction was made from. So the same
piece of work is timed again and again, by the wall clock, between all that is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.calibrate.spread import Spread
from pipefit.profiling.agreed import as_trained
from pipefit.profiling.clock import Clock
from pipefit.profiling.passes import Step
from pipefit.profiling.payload import batch_of, take
from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.session import Session
from pipefit.stage.split import NamedLayer

__all__ = ["WAITS_S", "Pace"]

_LEAST_S = 0.03
_TURNS = 3
WAITS_S = (3e-4, 2e-3, 2e-2)
"""How long a rank may have waited before it goes on: what `Pace.waking_s` looks at."""


class Pace:
    """A micro-batch through the whole model, to be timed at any moment; nothing is trained.

    Args:
        layers: of the whole model; their gradients are overwritten.
        example: (input, target) of at least one micro-batch.
        microbatch_size: samples of it.
        session: the ranks of the run, all of which must ask at once.
        loss: (output, target) -> scalar.

    Attributes:
        layers: the same.
        step: the whole model with that micro-batch.
        spread: of all that `microbatch_s` has timed on this rank.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        example: tuple[Any, Any],
        microbatch_size: int,
        session: Session,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        self.layers, self._session, self.spread = layers, session, Spread()
        x, y = (take(part, microbatch_size, batch_of(part)) for part in example)
        chain = [(layer.prefix, layer.module) for layer in layers]
        self.step = Step(chain, x, loss, y, Clock(torch.device("cpu")))

    def microbatch_s(self) -> list[float]:
        """Wall-clock seconds of a forward and backward on each rank now; it takes some hundredths of a second."""
        if self._session.is_distributed:
            dist.barrier()
        with as_trained(self.layers):
            times = [time.perf_counter()]
            while len(times) < 2 or times[-1] - times[0] < _LEAST_S:
                self.step.plain()
                times.append(time.perf_counter())
        seconds = (times[-1] - times[0]) / (len(times) - 1)
        self.spread.add([after - before for before, after in pairwise(times)])
        return [turn[0] for turn in gather_rows(self._session, [seconds])]

    def waking_s(self) -> list[float]:
        """Seconds that a micro-batch takes longer right after each of `WAITS_S` than right after another.

        While a core has nothing to do, its caches go cold, its clock slow, and another guest may have it.
        """
        if self._session.is_distributed:
            dist.barrier()
        samples: list[list[float]] = [[] for _ in (0.0, *WAITS_S)]
        with as_trained(self.layers):
            for _ in range(_TURNS):
                for found, wait_s in zip(samples, (0.0, *WAITS_S), strict=True):
                    self.step.plain()
                    if wait_s:
                        time.sleep(wait_s)
                    found.append(self.step.plain())
        at_once_s, *later_s = (statistics.median(found) for found in samples)
        ranks = gather_rows(self._session, [seconds - at_once_s for seconds in later_s])
        return [statistics.fmean(values) for values in zip(*ranks, strict=True)]
