"""The loss of each step, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipefit.errors import NonFiniteLossError
from pipefit.runtime.collectives import start_sum
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution


class PendingLosses:
    """The losses of a pass on their way to every rank; asking for them waits."""

    def __init__(
        self, engine: Engine, runs: Sequence[Execution], num_microbatches: int, num_steps: int, *extra: float
    ) -> None:
        # The last one counts the ranks that were asked to stop, so that all of them stop after the same step.
        own = extra if engine.mesh.is_first else (0.0,) * len(extra)
        extra = (*own, float(engine.session.stop.requested))
        # Every micro-batch's loss is known to one rank, and zero on the others: their sum is exact in any order, so the
        # losses of the steps are the same to the bit however the micro-batches lie on ranks.
        count = num_steps * num_microbatches
        table = torch.zeros(count + len(extra), dtype=torch.float64)
        losses = {mb: loss.reshape(()).double() for run in runs for mb, loss in run.losses}
        if losses and engine.mesh.is_first:
            table[list(losses)] = torch.stack(list(losses.values())).cpu()
        table[count:] = torch.tensor(extra, dtype=torch.float64)
        self._table, self._count, self._num_steps, self._session = table, count, num_steps, engine.session
        self._work = start_sum(engine.session, table)

    def wait(self) -> Sequence[float]:
        """The losses by step."""
        if self._work is not None:
            with self._session.awaiting_loss():
                self._work.wait()
        self._session.stop.agreed |= bool(self._table[-1])
        return self._table[: self._count].view(self._num_steps, -1).sum(1).tolist()

    @property
    def extra(self) -> Sequence[float]:
        """The further sums, after `wait`."""
        return self._table[self._count :].tolist()


def finite(loss: float, update: int) -> float:
    """The loss of an update, which is a number.

    Raises:
        NonFiniteLossError: it is not.
    """
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss of update {update} is {loss}; lower the learning rate, clip the gradients (clip_norm), "
            "or look for bad data; the weights may hold it already, so resume from an earlier checkpoint"
        )
    return loss
