"""How a batch of the Trainer is split into micro-batches, and the weights of their losses: tried on a few samples.

The Trainer's loss of an update is the sum of the losses of its batches. That of a batch equals

    the sum of the losses of its parts       where a loss is divided by the number of labels of the whole update
    their mean, weighted by their labels     where it is a mean over labels, or over samples

or neither, as for a contrastive loss, or with batch norms: then a batch is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipefit.cutting.own import IGNORED, Labels
from pipefit.errors import PlanError
from pipefit.integrations.one_replica import from_rank
from pipefit.pipeline.batches import samples_of
from pipefit.runtime.microbatches import MicroBatch, cut, feed_of
from pipefit.spec.options import Request
from pipefit.stage.accelerator import CPU

Arguments = dict[str, Any]
"""Tensors and plain values by the names of the model's arguments."""

Batch = Mapping[str, Any]
"""Likewise, not to be changed."""

ITEMS = "num_items_in_batch"
"""The Trainer's name for the number of labels of an update, which divides sums of losses."""

SUM = "sum"
MEAN = "mean"
UNKNOWN = "unknown"

_TRIED = 4
_MOST_TRIED = 16
_CLOSE = 1e-4


def num_samples(batch: Batch) -> int:
    """The number of samples of a batch of tensors."""
    found = samples_of(batch)
    assert found is not None
    return found


def for_each_sample(arguments: Batch) -> Arguments:
    """Arguments of a model with the number of labels as a tensor that is split by samples like all others."""
    found = {name: value for name, value in arguments.items() if value is not None}
    items = found.pop(ITEMS, None)
    if items is not None:
        found[ITEMS] = torch.as_tensor(items).reshape(1).repeat(num_samples(found))
    return found


class Split(NamedTuple):
    """The split of each batch.

    Attributes:
        parts: micro-batches of a batch; fewer where it has fewer samples.
        rule: how their losses give that of the batch: SUM, MEAN or UNKNOWN.
        labels: weights of a mean.
        size: micro-batches of an update.
    """

    parts: int
    rule: str
    labels: Labels
    size: int

    def feed(self, x: Batch, y: Batch, first: int, mode: str) -> list[MicroBatch]:
        """The micro-batches of a batch; see `feed_of`."""
        weigh = None
        if self.rule == MEAN and "labels" in y and self.labels(y) > 0:
            weigh = self.labels
        parts = min(self.parts, num_samples(y))
        found = feed_of((x, y), parts, first, mode, weigh)
        if self.rule == SUM:
            return [part._replace(share=1.0) for part in found]
        return found


def split_of(trainer: Any, batch: Batch, request: Request, trains: bool) -> Split:
    """The split for a request, which rank 0 finds with the whole model.

    Args:
        trainer: with the model, before it is taken apart.
        batch: the first one.
        request: of the user.
        trains: it is for training; else an evaluation comes before.

    Raises:
        PlanError: the micro-batches asked for do not suit the batches of an update, or the loss.
    """
    steps = trainer.args.gradient_accumulation_steps
    session = trainer.session
    rule = from_rank(session, session.rank == 0 and _rule(trainer, batch))
    labels = Labels.of(trainer.model)
    asked = request.microbatches
    if request.plan is not None:
        asked = request.plan.num_microbatches
    size = asked or 2 * session.num_ranks
    if not trains:
        return Split(1, rule, labels, size)
    if asked is not None and (asked % steps or (asked > steps and rule == UNKNOWN)):
        raise PlanError(
            f"{asked} micro-batches per update: expected a multiple of gradient_accumulation_steps={steps}, and for a "
            f"loss that is neither sum nor mean over samples, or batch norms, {steps}, because batches cannot be split"
        )
    parts = 1
    if rule != UNKNOWN:
        parts = -(-size // steps)
    return Split(parts, rule, labels, parts * steps)


def _rule(trainer: Any, batch: Batch) -> str:
    """How losses of parts give that of a batch, tried with some samples of it."""
    model = trainer.model
    if not isinstance(batch.get("labels"), Tensor):
        return UNKNOWN
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return UNKNOWN
    was_training = model.training
    model.eval()
    losses = []
    try:
        few = _tried(batch, getattr(getattr(model, "config", None), "num_labels", 2))
        items = trainer._get_num_items_in_batch([few], CPU)
        parts = cut(few, num_samples(few))
        with torch.no_grad(), torch.random.fork_rng():
            for part in (few, *parts):
                losses.append(float(trainer.compute_loss(model, dict(part), num_items_in_batch=items)))
    except Exception:
        # Such as a loss that ignores another label than -100. An error of the user's comes again in the first pass.
        return UNKNOWN
    finally:
        model.train(was_training)
    whole, *losses = losses
    weights = [Labels.of(model)(part) for part in parts]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    is_sum = abs(sum(losses) - whole) <= _CLOSE * abs(whole)
    is_mean = abs(mean / max(sum(weights), 1) - whole) <= _CLOSE * abs(whole)
    # Both fit where losses are 0, or one part has all labels: such samples decide nothing.
    if is_sum == is_mean:
        return UNKNOWN
    if is_sum:
        return SUM
    return MEAN


def _tried(batch: Batch, num_classes: int) -> Arguments:
    """Some samples of a batch, with labels by which the rules differ."""
    labels = batch["labels"]
    are_classes = not labels.is_floating_point()
    number = _TRIED
    if are_classes:
        num_classes = max(num_classes, int(labels.max()) + 1)
    if are_classes and labels.dim() == 1:
        number = max(_TRIED, min(num_classes, _MOST_TRIED))

    def some(tensor: Tensor) -> Tensor:
        """Rows of a tensor; those that come again are shifted, so that all differ."""
        size = len(tensor)
        return torch.stack([tensor[row % size].roll(row // size) for row in range(number)])

    few = pytree.tree_map_only(Tensor, some, {name: value for name, value in batch.items() if name != ITEMS})
    if are_classes:
        # Of many classes, which may have weights.
        labels = few["labels"]
        counted = labels.ne(IGNORED)
        labels[counted] = torch.arange(int(counted.sum())) % num_classes
        if labels.dim() > 1:
            # And a sample with one label, so that means over labels and over samples differ.
            second = labels[1].view(-1)
            second[second.ne(IGNORED).nonzero()[1:]] = IGNORED
    return few
