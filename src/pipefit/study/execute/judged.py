"""What a trial is worth on data that it is not trained on: the numbers of `Pipeline.evaluate`, a shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.runtime.microbatches import feed_of
from pipefit.stage.stage import Stage
from pipefit.study.execute.recipe import check_batch

__all__ = ["HeldOut"]


@dataclass
class _Judged:
    """A batch on its way through the shards.

    Attributes:
        values: of each micro-batch, what the last shard gave.
        targets: of each micro-batch.
        shares: how much each counts in the batch.
        count: samples of the batch.
    """

    values: list[Any]
    targets: list[Any]
    shares: list[float]
    count: int


@dataclass
class HeldOut:
    """Batches on their way through the shards of a trial."""

    batches: list[_Judged]

    @classmethod
    def of(cls, batches: Sequence[Any], num_microbatches: int) -> HeldOut:
        """Cuts batches as `Pipeline.evaluate` does.

        Raises:
            DataError: there are none, or one is no pair.
        """
        found = []
        for index, batch in enumerate(batches):
            x, y = check_batch(batch, index)
            count = int(pytree.tree_leaves(y)[0].shape[0])
            feed = feed_of([(x, y)], min(num_microbatches, count), 0, "eval")
            found.append(_Judged(list(feed.inputs), list(feed.targets), list(feed.shares), count))
        if not found:
            raise DataError("there is no held-out data to evaluate on: leave out evaluate, or give some")
        return cls(found)

    @torch.no_grad()
    def through(self, stage: Stage) -> None:
        """All micro-batches through the next shard, in evaluation mode."""
        stage.train(False)
        for batch in self.batches:
            for mb, value in enumerate(batch.values):
                batch.values[mb] = stage.forward(_to(value, stage.device), mb)
        # The modules outlast the stage, and the next one takes them to be training.
        stage.train(True)

    @torch.no_grad()
    def loss(self, of: Callable[[Any, Any], Tensor]) -> float:
        """The mean loss over all samples."""
        total = sum(batch.count * self._loss(batch, of) for batch in self.batches)
        return total / sum(batch.count for batch in self.batches)

    def _loss(self, batch: _Judged, of: Callable[[Any, Any], Tensor]) -> float:
        table = torch.zeros(1, len(batch.values), dtype=torch.float64)
        for mb, (value, target, share) in enumerate(zip(batch.values, batch.targets, batch.shares, strict=True)):
            device = pytree.tree_leaves(value)[0].device
            table[0, mb] = (of(value, _to(target, device)) * share).detach().reshape(()).double().cpu()
        return float(table.sum(1)[0])


def _to(payload: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), payload)
