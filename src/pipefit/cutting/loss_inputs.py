"""The proof that a loss reads nothing of a forward but its output: an example, with and without a forward in between.

forward of A                 loss of A's output
forward of A, forward of B   loss of A's output     must be the same: B is another micro-batch, or another rank's
"""

from __future__ import annotations

import contextlib
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


def refuse_aside(model: Any, loss: Callable[[Any, Any], Any], example: tuple[Any, Any]) -> None:
    """Refuses a loss that reads what the model's forward leaves elsewhere than in its output.

    Args:
        model: a `Cut`, or a sequence of layers; with all weights.
        loss: of its output and a target. An error in it, or in a forward, is left to the run.
        example: (input, target) of one batch.

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
    if len(losses) == 2 and worst_difference(*losses) is not None:
        raise ModelError(
            "the loss reads a value that the forward leaves elsewhere than in its output, such as an attribute of a "
            "block or a list: layers run in other processes and for other micro-batches; return the value as part of "
            "the output"
        )


def _run(model: Any, whole: nn.Module, batch: Any) -> Any:
    seed(0)
    if not isinstance(model, Cut):
        return whole(own_copy(batch))
    args, kwargs = model.shell.arguments(own_copy(batch))
    return model.shell.result(whole(*args, **kwargs))
