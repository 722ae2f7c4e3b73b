"""How a batch of the Trainer may be split into micro-batches, and the weights of their losses: tried on a few samples.

The Trainer's loss of an update is the sum of the losses of its batches. That of a batch equals

    the sum of the losses of its parts       where a loss is divided by the number of labels of the whole update
    their mean, weighted by their labels     where it is a mean over labels, or over samples

or neither, as for a contrastive loss: then a batch is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.cutting.own import IGNORED, Labels
from pipefit.errors import PlanError
from pipefit.integrations.one_replica import from_first
from pipefit.runtime.microbatches import cut
from pipefit.runtime.session import Session
from pipefit.spec.options import Request
from pipefit.stage.materialise import is_meta
from pipefit.stage.split import NamedLayer

ITEMS = "num_items_in_batch"
"""The Trainer's name for the number of labels of an update, which divides sums of losses."""

_TRIED = 4
_CLOSE = 1e-4


def num_samples(batch: Mapping[str, Any]) -> int:
    """The number of samples of a batch of tensors."""
    return max(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())


def for_each_sample(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model with the number of labels as a tensor that can be split by samples."""
    found = {name: value for name, value in arguments.items() if value is not None}
    if ITEMS in found:
        others = {name: value for name, value in found.items() if name != ITEMS}
        found[ITEMS] = torch.as_tensor(found[ITEMS]).reshape(1).repeat(num_samples(others))
    return found


@dataclass(frozen=True)
class Split:
    """The split of each batch.

    Attributes:
        parts: micro-batches of a batch.
        weigh: the weight of a part in the mean of its batch; None: losses of parts are added.
        is_known: whether losses of parts give that of the batch.
    """

    parts: int
    weigh: Labels | None
    is_known: bool

    def of(self, batch: Mapping[str, Any], parts: int) -> list[Any]:
        """A batch in parts, fewer where it has fewer samples."""
        return cut(batch, min(parts, num_samples(batch)))

    def first(self, batch: Mapping[str, Any]) -> Any:
        """The first part of a batch."""
        return self.of(batch, self.parts)[0]

    def shares(self, parts: Sequence[Any]) -> list[float]:
        """The factor of the loss of each part in that of its batch, where the model itself has one."""
        if self.weigh is None or len(parts) == 1 or "labels" not in parts[0]:
            return [1.0] * len(parts)
        weights = [self.weigh(part) for part in parts]
        return [weight / sum(weights) for weight in weights]


def split_of(trainer: Any, batch: Mapping[str, Any], request: Request, session: Session) -> Split:
    """The split for a request, which rank 0 finds with the whole model.

    Args:
        trainer: with the model, before it is taken apart.
        batch: the first one, with labels.
        request: of the user.
        session: the ranks of the run.

    Raises:
        PlanError: the micro-batches asked for do not suit the batches of an update, or the loss.
    """
    steps = trainer.args.gradient_accumulation_steps
    is_known, weigh = from_first(session, session.rank == 0 and _rule(trainer, batch))
    asked = request.microbatches
    if request.plan is not None:
        asked = request.plan.num_microbatches
    parts = asked or steps
    if asked is None and is_known:
        parts = max(-(-2 * session.num_ranks // steps), 1) * steps
    if parts % steps:
        raise PlanError(
            f"{parts} micro-batches per update: expected a multiple of gradient_accumulation_steps={steps}, because a "
            "micro-batch is a part of one batch"
        )
    if parts > steps and not is_known:
        raise PlanError(
            f"{parts} micro-batches per update need batches that are split, but the loss of a batch is not that of its "
            f"parts: use microbatches={steps}, with more gradient_accumulation_steps for more of them"
        )
    return Split(parts // steps, weigh, is_known)


def _rule(trainer: Any, batch: Mapping[str, Any]) -> tuple[bool, Labels | None]:
    """Whether losses of parts give that of a batch, and their weights; tried with some samples of it."""
    model = trainer.model
    if "labels" not in batch or num_samples(batch) < 2:
        return False, None
    if is_meta([NamedLayer(0, "", model)]):
        return trainer.model_accepts_loss_kwargs and trainer._loss_shifts_labels, None
    few = cut({name: value for name, value in batch.items() if name != ITEMS}, num_samples(batch))[:_TRIED]
    few[1]["labels"] = _few_labels(few[1]["labels"])
    joined = pytree.tree_map(_joined, *few)
    items = trainer._get_num_items_in_batch([joined], torch.device("cpu"))
    was_training = model.training
    model.eval()

    def loss_of(part: Mapping[str, Any]) -> float:
        return float(trainer.compute_loss(model, dict(part), num_items_in_batch=items))

    with torch.no_grad(), torch.random.fork_rng():
        whole = loss_of(joined)
        losses = [loss_of(part) for part in few]
    model.train(was_training)
    if _is_close(sum(losses), whole):
        return True, None
    weigh = Labels.of(model)
    weights = [weigh(part) for part in few]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return _is_close(mean / max(sum(weights), 1), whole), weigh


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * abs(other)


def _joined(*leaves: Any) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    return leaves[0]


def _few_labels(labels: Tensor) -> Tensor:
    """Labels of a sample with one of many left, so that means over labels and over samples differ."""
    if labels.is_floating_point() or labels.dim() < 2:
        return labels
    found = labels.clone()
    left_out = found.ne(IGNORED).flatten().nonzero()[1:]
    found.view(-1)[left_out] = IGNORED
    return found
