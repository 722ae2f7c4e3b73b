"""The proof that a loss reads nothing of a forward but its output: an example, with and without a forward in between.

forward of A                 loss of A's output
forward of A, forward of B   loss of A's output     must be the same: B is another micro-batch, or another rank's
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.cut_model import Cut
from pipefit.cutting.differences import worst_difference
from pipefit.cutting.proof import seed
from pipefit.cutting.states import States, kept_outside, own_copy
from pipefit.errors import ModelError
from pipefit.runtime.microbatches import Weigh, feed_of
from pipefit.runtime.session import current

_log = logging.getLogger("pipefit.cut")

_NO_MEAN = (
    "the loss of the example is %.6g, but the mean of its halves, by their weights, is %.6g; several micro-batches "
    "train by their mean: return a mean over samples, or give Updates(weigh=…), from a micro-batch's target to its "
    "weight, such as the number of tokens that count"
)


def refuse_aside(model: Any, loss: Callable[[Any, Any], Any], example: tuple[Any, Any], weigh: Weigh | None) -> None:
    """Refuses a loss that reads what the model's forward leaves elsewhere than in its output.

    It warns where the loss of the example is not the mean loss of its halves.

    Args:
        model: a `Cut`, or a sequence of layers; with all weights.
        loss: of its output and a target. An error in it, or in a forward, is left to the run.
        example: (input, target) of one batch.
        weigh: from the target of a half to its weight; None: its number of samples.

    Raises:
        ModelError: it does.
    """
    both: Any = nn.Module()
    both.loss = loss
    if isinstance(model, Cut):
        both.model = model.model
    else:
        both.model = nn.Sequential(*model)
    losses: list[list[Any]] = []
    other = pytree.tree_map_only(Tensor, lambda leaf: leaf.roll(1), example[0])
    with contextlib.suppress(Exception), kept_outside(both), torch.no_grad():
        states = States(both)
        for others in ((), (other,)):
            with states.used(states.fresh()):
                output = _run(model, both.model, example[0])
                for other in others:
                    _run(model, both.model, other)
                seed(0)
                losses.append(pytree.tree_leaves(both.loss(output, own_copy(example[1]))))
        _warn_of_no_mean(both, states, (output, example[1]), float(losses[0][0]), weigh)
    if len(losses) == 2 and worst_difference(*losses) is not None:
        raise ModelError(
            "the loss reads a value that the forward leaves elsewhere than in its output, such as an attribute of a "
            "block or a list: layers run in other processes and for other micro-batches; return the value as part of "
            "the output"
        )


def _warn_of_no_mean(both: Any, states: States, batch: tuple[Any, Any], whole: float, weigh: Weigh | None) -> None:
    """Warns where the loss of a batch, (output, target), is not the mean of those of its halves."""
    mean = 0.0
    for half in feed_of(own_copy(batch), 2, 0, "train", weigh):
        with states.used(states.fresh()):
            seed(0)
            mean += half.share * float(pytree.tree_leaves(both.loss(half.input, half.target))[0])
    if abs(whole - mean) > 1e-3 * abs(whole) and current().rank == 0:
        _log.warning(_NO_MEAN, whole, mean)


def _run(model: Any, whole: nn.Module, batch: Any) -> Any:
    seed(0)
    if not isinstance(model, Cut):
        return whole(own_copy(batch))
    args, kwargs = model.shell.arguments(own_copy(batch))
    return model.shell.result(whole(*args, **kwargs))
