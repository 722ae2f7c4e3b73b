"""How fast the machine is at the moment: one micro-batch through the whole model, on every rank at once.

Other programs and other guests of a shared server make a machine now faster, now slower, by as much as twice, and what
is compared with a prediction must not have run at another speed than what the prediction was made from. So the same
piece of work is timed again and again, by the wall clock, between all that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.profiling.clock import Clock
from pipefit.profiling.passes import Step
from pipefit.profiling.payload import batch_of, take
from pipefit.runtime.session import Session
from pipefit.stage.split import NamedLayer
from pipefit.train.profiled import as_trained

__all__ = ["Pace"]

_LEAST_S = 0.03


class Pace:
    """A micro-batch through the whole model, to be timed at any moment; nothing is trained.

    Args:
        layers: of the whole model; their gradients are overwritten.
        example: (input, target) of at least one micro-batch.
        microbatch_size: samples of it.
        session: the ranks of the run, all of which must ask at once.
        loss: (output, target) -> scalar.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        example: tuple[Any, Any],
        microbatch_size: int,
        session: Session,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        self._layers, self._session = layers, session
        x, y = (take(part, microbatch_size, batch_of(part)) for part in example)
        chain = [(layer.prefix, layer.module) for layer in layers]
        self._step = Step(chain, x, loss, y, Clock(torch.device("cpu")))

    def microbatch_s(self) -> float:
        """Wall-clock seconds of a forward and backward now, the mean over the ranks; some hundredths of a second."""
        if self._session.is_distributed:
            dist.barrier()
        with as_trained(self._layers):
            began, num = time.perf_counter(), 0
            while not num or time.perf_counter() - began < _LEAST_S:
                self._step.plain()
                num += 1
            seconds = torch.tensor((time.perf_counter() - began) / num, dtype=torch.float64)
        if self._session.is_distributed:
            dist.all_reduce(seconds)
        return float(seconds) / self._session.num_ranks
