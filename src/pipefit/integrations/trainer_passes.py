"""The passes of a pipeline over batches of the Trainer: an update of some batches, and the outputs for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipefit.integrations.one_replica import from_rank
from pipefit.integrations.split_losses import UNKNOWN, Batch, Split
from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.microbatches import MicroBatch
from pipefit.runtime.worker import evaluating
from pipefit.schedules.forward import forward_only


def train(pipe: Pipeline, split: Split, batches: Sequence[Any]) -> tuple[float, Tensor | None]:
    """Runs one update over some batches, each split into micro-batches.

    Args:
        pipe: with the Trainer's loss.
        split: of each batch.
        batches: each the inputs of the model, and of the loss.

    Returns:
        The sum of their losses, and the norm of all gradients before clipping.
    """
    feed: list[MicroBatch] = []
    for x, y in batches:
        feed += split.feed(x, y, pipe.state.ordinal + len(feed), "train")
    # The last update of an epoch may have fewer, and the program has no fewer: repeated ones add zeros.
    while len(feed) < pipe.plan.num_microbatches:
        feed.append(feed[-1]._replace(share=0.0, ordinal=feed[-1].ordinal + 1))
    done = pipe.loop.start(1, feed, [(0, 0)], time.perf_counter())
    return done.losses.wait()[0], done.norms[0]


def forward(pipe: Pipeline, split: Split, batch: Batch, only: str | None) -> dict[str, Tensor]:
    """The outputs of the model for a batch in evaluation mode, by name, the same on every rank.

    Args:
        pipe: its weights are not changed.
        split: of each batch.
        batch: the arguments of the model.
        only: the name of the one output that is needed; None: all are.
    """
    if split.rule != UNKNOWN or "labels" not in batch:
        split = split._replace(parts=pipe.plan.num_microbatches)
    feed = split.feed(batch, batch, 0, "eval")
    found: dict[int, Any] = {}

    def keep(output: Batch, target: Any) -> float:
        done = {mb for run in pipe.engine.executions for mb, _ in run.losses}
        (mb,) = done - found.keys()
        found[mb] = {name: value.cpu() for name, value in output.items() if only in (None, name)}
        return 0.0

    program = forward_only(pipe.program.header, len(feed))
    with evaluating(pipe.workers), torch.no_grad():
        pipe.engine.run(program, feed, keep, loss=_own_loss)
    own = dict(found)
    for rank in range(pipe.session.num_ranks):
        found |= from_rank(pipe.session, own, rank)
    outputs = {}
    for name in found[0]:
        values = [found[part.ordinal][name] for part in feed]
        if name == "loss":
            weighted = [value * part.share for value, part in zip(values, feed, strict=True) if part.share]
            outputs[name] = torch.stack(weighted).sum()
        else:
            outputs[name] = torch.cat(values)
    return outputs


def _own_loss(output: Batch, target: Any) -> Any:
    """The loss among the outputs of a model; 0: it has none without labels."""
    return output.get("loss", torch.zeros(()))
