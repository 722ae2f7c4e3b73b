"""The mean loss over data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.ir.program import Header
from pipefit.pipeline.losses import PendingLosses
from pipefit.pipeline.tensor_parallel import TensorParallel
from pipefit.runtime.engine import Engine
from pipefit.runtime.microbatches import Weigh, feed_of, pair_of
from pipefit.schedules.forward import forward_only


def evaluate(
    engine: Engine,
    header: Header,
    tensor: TensorParallel,
    batches: Iterable[Any],
    metric: Callable[[Any, Any], float] | None,
    weigh: Weigh | None,
) -> tuple[float, float]:
    """Mean loss and mean metric over some batches, the same on every rank; without a metric its mean is 0.

    Args:
        engine: the ranks.
        header: of the training's program: its stages, and the micro-batches of a full batch.
        tensor: the layers, which know the metric of a sharded output.
        batches: of (input, target).
        metric: from output and target to a number.
        weigh: how much a micro-batch counts in its batch.

    Raises:
        DataError: there are no batches.
    """
    total = loss = measured = 0.0
    measure = tensor.metric(metric)
    for batch in batches:
        x, y = pair_of(batch)
        tensor.check(x)
        count = len(y) if isinstance(y, Tensor) else len(pytree.tree_leaves(y)[0])
        num = min(header.num_microbatches, count)
        feed = feed_of([(x, y)], num, 0, "eval", weigh)
        for worker in engine.workers:
            worker.train(False)
        with torch.no_grad():
            runs = engine.run(forward_only(header, num), feed, measure)
        sums = PendingLosses(engine, runs, num, 1, sum(value for run in runs for value in run.metrics))
        loss += sums.wait()[0] * count
        measured += sums.extra[0] * count
        total += count
    if not total:
        raise DataError("there is no data to evaluate: the iterable of batches is empty")
    return loss / total, measured / total
