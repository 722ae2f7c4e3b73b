"""The loss of each step, the same number on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.runtime.engine import Engine, PassResult

__all__ = ["PendingLosses"]


class PendingLosses:
    """The losses of a pass on their way to every rank; asking for them waits."""

    def __init__(
        self, engine: Engine, result: PassResult, num_microbatches: int, num_steps: int, *extra: float
    ) -> None:
        # The last one counts the ranks that were asked to stop, so that all of them stop after the same step.
        extra = (*extra, float(engine.session.stop.requested))
        sums = torch.zeros(num_steps + len(extra), dtype=torch.float64)
        local: dict[int, list[Tensor]] = {}
        for mb, loss in sorted(result.losses.items()):
            local.setdefault(mb // num_microbatches, []).append(loss)
        for step, losses in local.items():
            sums[step] = torch.stack(losses).double().sum()
        sums[num_steps:] = torch.tensor(extra, dtype=torch.float64)
        self._sums, self._num_steps, self._session = sums, num_steps, engine.session
        self._work = dist.all_reduce(sums, async_op=True) if engine.session.is_distributed else None

    def wait(self) -> Sequence[float]:
        """The losses by step."""
        if self._work is not None:
            with self._session.awaiting_loss():
                self._work.wait()
        self._session.stop.agreed |= bool(self._sums[-1])
        return self._sums[: self._num_steps].tolist()

    @property
    def extra(self) -> Sequence[float]:
        """The further sums, after `wait`."""
        return self._sums[self._num_steps :].tolist()
