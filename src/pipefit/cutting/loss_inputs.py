"""The proof that a loss reads nothing of a forward but its output: an example, with and without a forward in between.

forward of A                 loss of A's output
forward of A, forward of B   loss of A's output     must be the same: B is another micro-batch, or another rank's
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.cut_model import Cut
from pipefit.cutting.differences import worst_difference
from pipefit.cutting.proof import seed
from pipefit.cutting.states import States, kept_outside, own_copy
from pipefit.errors import ModelError
from pipefit.runtime.microbatches import Weigh, cut, feed_of, largest_part
from pipefit.runtime.session import current

_log = logging.getLogger("pipefit.cut")

_FACTOR = 20
"""One more than the largest factor of an output that is tried in addition."""
_FEW = 4
"""The fewest samples of the first micro-batch, if it has so many, that are compared with their parts."""

_NO_MEAN = (
    "the loss of the %s is %.6g, but the mean of its parts, by their weights, is %.6g; several micro-batches "
    "train by their mean: return a mean over samples, or give Updates(weigh=…), from a micro-batch's target to its "
    "weight, such as the number of tokens that count"
)


def refuse_aside(model: Any, loss: Callable[[Any, Any], Any], example: tuple[Any, Any], weigh: Weigh | None) -> None:
    """Refuses a loss that reads what the model's forward leaves elsewhere than in its output.

    It warns where the loss of the example is not the mean loss of its parts.

    Args:
        model: a `Cut`, or a sequence of layers; with all weights.
        loss: of its output and a target. An error in it, or in a forward, is left to the run.
        example: (input, target) of one batch.
        weigh: from the target of a part to its weight; None: its number of samples.

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
        warning = _no_mean("example", both, (output, example[1]), weigh)
        if warning and current().rank == 0:
            _log.warning("%s", warning)
    if len(losses) == 2 and worst_difference(*losses) is not None:
        raise ModelError(
            "the loss reads a value that the forward leaves elsewhere than in its output, such as an attribute of a "
            "block or a list: layers run in other processes and for other micro-batches; return the value as part of "
            "the output"
        )


class FirstLoss:
    """A loss that warns at its first call if it is not the mean of its parts.

    Args:
        loss: of an output and a target.
        model: a sequence of layers, which the loss may hold.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], model: Sequence[nn.Module]) -> None:
        both: Any = nn.Module()
        both.model = nn.ModuleList(model)
        both.loss = loss
        self._both = both
        self.loss = loss
        self._is_checked = False

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss."""
        if not self._is_checked:
            self._is_checked = True
            with contextlib.suppress(Exception), kept_outside(self._both), torch.no_grad():
                few = cut((output, target), max(largest_part(output, 1) // _FEW, 1))[0]
                warning = _no_mean("first samples", self._both, few, None)
                if warning:
                    current().warnings.append(warning)
        return self.loss(output, target)


def _no_mean(what: str, both: Any, batch: tuple[Any, Any], weigh: Weigh | None) -> str:
    """The warning that the loss of a batch, (output, target), is not the mean of those of its parts; empty: it is.

    An untrained model gives all samples nearly the same loss, so other outputs are tried, too.
    """
    states = States(both)

    def loss_of(part: tuple[Any, Any]) -> float:
        with states.used(states.fresh()):
            seed(0)
            return float(pytree.tree_leaves(both.loss(*part))[0])

    most = min(largest_part(batch[0], 1), 3)
    for name, output, parts in ((what, batch[0], 2), (f"{what}, with other outputs,", _other(batch[0]), most)):
        whole = loss_of(own_copy((output, batch[1])))
        mean = 0.0
        for part in feed_of(own_copy((output, batch[1])), parts, 0, "train", weigh):
            mean += part.share * loss_of((part.input, part.target))
        if abs(whole - mean) > 1e-3 * abs(whole):
            return _NO_MEAN % (name, whole, mean)
    return ""


def _other(output: Any) -> Any:
    """An output of other values, by a random factor each."""
    seed(0)
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf * torch.randint(1, _FACTOR, leaf.shape, device=leaf.device), output
    )


def _run(model: Any, whole: nn.Module, batch: Any) -> Any:
    seed(0)
    if not isinstance(model, Cut):
        return whole(own_copy(batch))
    args, kwargs = model.shell.arguments(own_copy(batch))
    return model.shell.result(whole(*args, **kwargs))
