"""The proof that a loss reads nothing of a forward but its output: an example, with and without a forward in between.

forward of A                 loss of A's output
forward of A, forward of B   loss of A's output     must be the same: B is another micro-batch, or another rank's
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.cut_model import Cut
from pipefit.cutting.differences import worst_difference
from pipefit.cutting.own import IGNORED, random_batch
from pipefit.cutting.proof import seed
from pipefit.cutting.states import States, kept_outside, own_copy, with_loss
from pipefit.errors import ModelError
from pipefit.runtime.microbatches import Weigh, feed_of, largest_part
from pipefit.runtime.session import current
from pipefit.stage.device import random_state_kept
from pipefit.stage.materialise import lent_weights
from pipefit.stage.training import Loss

_log = logging.getLogger("pipefit.cut")

_NO_MEAN = (
    "the loss of some outputs is %.6g, but the mean of its parts, by their weights, is %.6g; several micro-batches "
    "train by their mean: return a mean over samples, or give Updates(weigh=…), from a micro-batch's target to its "
    "weight, such as the number of tokens that count"
)

_NO_OWN_MEAN = (
    "the loss of %s for some samples is %.6g, but the mean of those of each sample, by their weights, is %.6g; several "
    "micro-batches train by their mean: train with microbatches=1, or give a loss=… that is a mean, and "
    "Updates(weigh=…), from a micro-batch's target to its weight"
)

_SAMPLES = 4
"""Samples of which a model's own loss is tried."""


def refuse_aside(model: Any, loss: Loss, example: tuple[Any, Any], weigh: Weigh | None) -> None:
    """Refuses a loss that reads what the model's forward leaves elsewhere than in its output.

    It warns where the loss is not the mean loss of the parts of a batch.

    Args:
        model: a `Cut`, or a sequence of layers; with all weights.
        loss: of its output and a target. An error in it, or in a forward, is left to the run.
        example: (input, target) of one batch.
        weigh: from the target of a part to its weight; None: its number of samples.

    Raises:
        ModelError: it does.
    """
    if isinstance(model, Cut):
        both = with_loss(loss, model.model)
    else:
        both = with_loss(loss, nn.Sequential(*model))
    losses = []
    other = pytree.tree_map_only(Tensor, lambda leaf: leaf.roll(1), example[0])
    with contextlib.suppress(Exception), kept_outside(both), torch.no_grad():
        states = States(both)
        for others in ((), (other,)):
            with states.apart():
                output = _run(model, both.model, example[0])
                for other in others:
                    _run(model, both.model, other)
                seed(0)
                losses.append(pytree.tree_leaves(both.loss(output, own_copy(example[1]))))
        if current().rank == 0:
            _warn_of_no_mean(both, (output, example[1]), weigh)
    if len(losses) == 2 and worst_difference(*losses) is not None:
        raise ModelError(
            "the loss reads a value that the forward leaves elsewhere than in its output, such as an attribute of a "
            "block or a list: layers run in other processes and for other micro-batches; return the value as part of "
            "the output"
        )


def warn_of_own_loss(whole: Cut, weigh: Weigh | None, batch: Any) -> None:
    """Warns where a model's own loss is not the mean of those of the samples of a batch, by their weights.

    Args:
        whole: a model that was cut.
        weigh: from a part of a batch to its weight; None: its number of samples.
        batch: with labels, of which some samples are tried; None: a random one. An error is left to the run.
    """
    model = whole.model
    found = []
    with (
        contextlib.suppress(Exception),
        kept_outside(model),
        States(model).apart(),
        lent_weights(model),
        torch.no_grad(),
    ):
        for module in model.modules():
            # Not by eval(), with which a module may change its weights.
            module.training = False
        few = _of_unequal_labels(batch or random_batch(model, _SAMPLES), getattr(weigh, "ignored", IGNORED))
        parts = feed_of((few, few), len(few["labels"]), 0, "eval", weigh)
        for given in (few, *(part.input for part in parts)):
            args, kwargs = whole.shell.arguments(given)
            output = whole.shell.result(model(*args, **kwargs))
            found.append(float(output["loss"]))
        mean = sum(part.share * loss for part, loss in zip(parts, found[1:], strict=True) if part.share)
        if math.isfinite(found[0]) and abs(found[0] - mean) > 1e-3 * abs(found[0]):
            _log.warning(_NO_OWN_MEAN, type(model).__name__, found[0], mean)


def _of_unequal_labels(batch: Any, ignored: int) -> dict[str, Any]:
    """Some samples of a batch, of which the second has two labels, so that means over labels and samples differ."""
    few: dict[str, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor[:_SAMPLES].clone(), dict(batch))
    labels = few["labels"]
    if labels.dim() > 1 and not labels.is_floating_point():
        labels[1].view(-1)[2:] = ignored
    return few


_CHECKED = 8
"""Calls of a loss that are checked: the first targets may all count, or be of one class."""


class FirstLoss:
    """A loss that warns at one of its first calls if it is not the mean of its parts.

    Args:
        loss: of an output and a target.
        layers: which the loss may hold.
    """

    def __init__(self, loss: Loss, layers: nn.Module) -> None:
        self._loss = loss
        self._both = with_loss(loss, layers)
        self._left = _CHECKED

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss."""
        if self._left:
            self._left -= 1
            both = self._both
            attributes = getattr(self._loss, "__dict__", {})
            before = dict(attributes)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            # The check seeds the generators of all devices.
            kept = contextlib.ExitStack()
            with contextlib.suppress(Exception), kept, torch.no_grad():
                kept.enter_context(random_state_kept(leaves[0].device))
                kept.enter_context(kept_outside(both))
                if _warn_of_no_mean(both, (output, target), None):
                    self._left = 0
            attributes.clear()
            attributes.update(before)
        return self._loss(output, target)


def _warn_of_no_mean(both: Any, batch: tuple[Any, Any], weigh: Weigh | None) -> bool:
    """Warns, and returns True, where the loss of a batch, (output, target), is not the mean of those of its parts.

    An untrained model gives all samples nearly the same loss, so outputs are changed.
    """
    seed(0)
    output = pytree.tree_map_only(Tensor, _changed, batch[0])
    most = min(largest_part(output, 1), 3)
    (whole,) = feed_of((output, own_copy(batch[1])), 1, 0, "train", weigh)
    states = States(both)
    found = []
    for part in (whole, *feed_of((output, own_copy(batch[1])), most, 0, "train", weigh)):
        with states.apart():
            seed(0)
            found.append(part.share * float(pytree.tree_leaves(both.loss(part.input, part.target))[0]))
    mean = sum(found[1:])
    is_same = abs(found[0] - mean) <= 1e-3 * abs(found[0])
    is_another = math.isfinite(found[0]) and not is_same
    if is_another:
        _log.warning(_NO_MEAN, found[0], mean)
    return is_another


def _changed(leaf: Tensor) -> Tensor:
    """An output with a random factor for each number; probabilities stay between 0 and 1."""
    if not leaf.is_floating_point():
        return leaf
    factor = 20
    if leaf.amin() >= 0:
        factor = 1
    return leaf * torch.rand_like(leaf).mul_(factor)


def _run(model: Any, whole: nn.Module, batch: Any) -> Any:
    seed(0)
    if not isinstance(model, Cut):
        return whole(own_copy(batch))
    args, kwargs = model.shell.arguments(own_copy(batch))
    return model.shell.result(whole(*args, **kwargs))
