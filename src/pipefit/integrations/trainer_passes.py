"""The passes of a pipeline over batches of the Trainer: an update of some batches, and the outputs for one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipefit.integrations.one_replica import from_all
from pipefit.integrations.split_losses import Split
from pipefit.parallel.alike import described
from pipefit.pipeline.losses import PendingLosses
from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.microbatches import MicroBatch
from pipefit.schedules.forward import forward_only


def train(pipe: Pipeline, split: Split, batches: Sequence[tuple[Any, Any]]) -> tuple[float, Tensor | None]:
    """Runs one update over some batches, each split into micro-batches.

    Args:
        pipe: with the Trainer's loss.
        split: of each batch.
        batches: inputs of the model, and of the loss, with the number of labels of all of them.

    Returns:
        The sum of their losses, and the norm of all gradients before clipping.
    """
    parts: list[tuple[Any, Any, float]] = []
    for x, y in batches:
        inputs = split.of(x, split.parts)
        targets = split.of(y, split.parts)
        parts += zip(inputs, targets, split.shares(targets), strict=True)
    # The last update of an epoch may have fewer, and the program has no fewer: repeated ones add zeros.
    missing = pipe.plan.num_microbatches - len(parts)
    x, y, _ = parts[-1]
    parts += [(x, y, 0.0)] * missing
    done = pipe.loop.start(1, _feed(parts, pipe.state.ordinal, "train"), [(0, 0)], time.perf_counter())
    (loss,) = done.losses.wait()
    return loss, done.norms[0]


def forward(pipe: Pipeline, split: Split, batch: Mapping[str, Any], needs_outputs: bool) -> dict[str, Tensor]:
    """Runs a batch through all stages in evaluation mode.

    Args:
        pipe: its weights are not changed.
        split: of each batch.
        batch: the arguments of the model.
        needs_outputs: also return what else the model gave, on every rank.

    Returns:
        The model's outputs by name, the same on every rank: its loss, if it has one, and the others.
    """
    num = 1
    if split.is_known or "labels" not in batch:
        num = pipe.plan.num_microbatches
    inputs = split.of(batch, num)
    parts = list(zip(inputs, inputs, split.shares(inputs), strict=True))
    program = forward_only(pipe.program.header, len(parts))
    found: dict[int, Mapping[str, Tensor]] = {}
    has_loss = False

    def keep(output: Mapping[str, Tensor], target: Any) -> float:
        done = [mb for run in pipe.engine.executions for mb, _ in run.losses]
        (mb,) = found.keys() ^ done
        found[mb] = {}
        if needs_outputs:
            found[mb] = {name: value.cpu() for name, value in output.items()}
        return 0.0

    def loss_of(output: Mapping[str, Tensor], target: Any) -> Tensor:
        nonlocal has_loss
        has_loss = "loss" in output
        return output.get("loss", torch.zeros(()))

    for worker in pipe.workers:
        worker.train(False)
    with torch.no_grad():
        runs = pipe.engine.run(program, _feed(parts, 0, "eval"), keep, loss=loss_of)
    (loss,) = PendingLosses(pipe.engine, runs, len(parts), 1).wait()
    pieces: dict[int, Mapping[str, Tensor]] = {}
    for other, own in from_all(pipe.session, (has_loss, found)):
        has_loss |= other
        pieces |= own
    outputs = {}
    if has_loss:
        outputs["loss"] = torch.tensor(loss, dtype=torch.float32)
    for name in pieces[0]:
        if name != "loss":
            outputs[name] = torch.cat([pieces[place][name] for place in range(len(parts))])
    return outputs


def _feed(parts: Sequence[tuple[Any, Any, float]], first: int, mode: str) -> list[MicroBatch]:
    """The micro-batches of a pass; rank 0 has read them, so that all ranks have the same."""
    found = []
    for ordinal, (x, y, share) in enumerate(parts, first):
        found.append(MicroBatch(x, y, share, ordinal, f"{mode} {described(x)} {described(y)}"))
    return found
