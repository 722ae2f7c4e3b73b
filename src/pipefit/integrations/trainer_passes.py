"""The passes of a pipeline over batches of the Trainer: an update of some batches, and the outputs for one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.integrations.one_replica import from_rank
from pipefit.integrations.split_losses import UNKNOWN, Batch, Split
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.programs import Programs
from pipefit.runtime.microbatches import MicroBatch
from pipefit.runtime.worker import evaluating
from pipefit.schedules.forward import forward_only


def train(pipe: Pipeline, split: Split, batches: Sequence[Any]) -> tuple[float, Tensor | None]:
    """Runs one update over some batches, each split into micro-batches.

    Args:
        pipe: with the Trainer's loss.
        split: of each batch.
        batches: each the inputs of the model, and of the loss, and the share of its loss.

    Returns:
        The sum of their losses, and the norm of all gradients before clipping.
    """
    feed: list[MicroBatch] = []
    for x, y, share in batches:
        parts = split.feed(x, y, pipe.state.ordinal + len(feed), "train")
        feed += [part._replace(share=part.share * share) for part in parts]
    # Data may end within an update; then its batches are a part of the next one.
    size = -(-len(feed) // split.size) * split.size
    if size != pipe.plan.num_microbatches:
        plan = replace(pipe.plan, num_microbatches=size)
        pipe.follow(plan, Programs(plan, pipe.training, pipe.layers, None), pipe.session)
    # The last update of an epoch may have fewer, and the program has no fewer: repeated ones add zeros.
    while len(feed) < pipe.plan.num_microbatches:
        feed.append(feed[-1]._replace(share=0.0, ordinal=feed[-1].ordinal + 1))
    done = pipe.loop.start(1, feed, [(0, 0)], time.perf_counter())
    return done.losses.wait()[0], done.norms[0]


def forward(pipe: Pipeline, split: Split, batch: Batch, has_loss: bool, only: str | None) -> Any:
    """The outputs of the model for a batch in evaluation mode, the same on every rank.

    Args:
        pipe: its weights are not changed.
        split: of each batch.
        batch: the arguments of the model.
        has_loss: they make it compute a loss.
        only: the name of the one output that is needed; None: all are.
    """
    parts = 1
    if split.rule != UNKNOWN or not has_loss:
        parts = split.size
    split = split._replace(parts=parts)
    feed = split.feed(batch, batch, 0, "eval")
    found: dict[int, Any] = {}

    def keep(output: Any, target: Any) -> float:
        done = {mb for run in pipe.engine.executions for mb, _ in run.losses}
        (mb,) = done - found.keys()
        if only is not None and isinstance(output, Mapping):
            output = {name: value for name, value in output.items() if name == only}
        found[mb] = pytree.tree_map_only(Tensor, Tensor.cpu, output)
        return 0.0

    program = forward_only(pipe.program.header, len(feed))
    with evaluating(pipe.workers), torch.no_grad():
        # Also a micro-batch without labels has outputs.
        pipe.engine.run(program, [part._replace(share=1.0) for part in feed], keep, loss=_no_loss)
    own = dict(found)
    for rank in range(pipe.session.num_ranks):
        found |= from_rank(pipe.session, own, rank)

    def joined(*values: Any) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        if values[0].dim():
            return torch.cat(values)
        weighted = [value * part.share for value, part in zip(values, feed, strict=True) if part.share]
        return torch.stack(weighted).sum()

    return pytree.tree_map(joined, *(found[part.ordinal] for part in feed))


def _no_loss(output: Any, target: Any) -> Tensor:
    return torch.zeros(())
