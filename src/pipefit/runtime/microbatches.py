"""Batches split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.parallel.alike import Shapes, described
from pipefit.parallel.loss import ignored_target
from pipefit.stage.payload import is_plain

Weigh = Callable[[Any], float]
"""The weight of a micro-batch in the mean of its batch, from its target; by default its number of samples."""


_WHOLE = "a batch that cannot be split by samples, such as a graph, trains with microbatches=1"


class MicroBatch(NamedTuple):
    """The data of a micro-batch.

    Attributes:
        input: of the model.
        target: of the loss.
        share: in the loss of its step; shares add up to 1 over a step.
        ordinal: its number since training began.
        signature: its shapes and plain values, and whether it trains.
        batch: the shapes of its batch, which ranks compare; None: they are known to be the same.
    """

    input: Any
    target: Any
    share: float
    ordinal: int
    signature: str
    batch: Shapes | None = None


class Feed(Protocol):
    """The data of one pass over a program: its micro-batches, made when they are requested."""

    def __getitem__(self, mb: int, /) -> MicroBatch: ...


def cut(batch: Any, num_microbatches: int, what: str = "the batch") -> list[Any]:
    """A pytree of tensors, split along their first dimension into nearly equal parts; plain values are in every part.

    A single micro-batch is the batch itself, whatever that is: a graph, or a scalar next to samples.

    Raises:
        DataError: there are fewer samples than micro-batches, the tensors have different numbers of samples, or a list
            has a plain value for each sample.
    """
    leaves, structure = pytree.tree_flatten(batch)
    split = [leaf for leaf in leaves if not is_plain(leaf)]
    sizes: set[int] = set()
    if all(isinstance(leaf, Tensor) and leaf.dim() and leaf.layout == torch.strided for leaf in split):
        sizes.update(leaf.shape[0] for leaf in split)
    if num_microbatches == 1 and len(sizes) != 1:
        return [batch]
    if not sizes:
        kinds = sorted({type(leaf).__name__ for leaf in split or leaves})
        got = ", ".join(kinds) or "nothing"
        raise DataError(f"{what}: expected dense tensors whose first dimension counts samples, got {got}; {_WHOLE}")
    if len(sizes) > 1:
        raise DataError(f"{what}: its tensors have {sorted(sizes)} samples; all need the same number, or {_WHOLE}")
    if (size := sizes.pop()) < num_microbatches:
        raise DataError(
            f"{what} has {size} samples, too few for {num_microbatches} micro-batches; "
            f"use a batch of at least {num_microbatches}, or at most {size} micro-batches"
        )

    def is_row(value: Any) -> bool:
        return type(value) is list and len(value) == size and all(map(is_plain, pytree.tree_leaves(value)))

    if num_microbatches > 1 and any(map(is_row, pytree.tree_leaves(batch, is_leaf=is_row))):
        raise DataError(
            f"{what} has {size} samples and a list of {size} plain values, which would not be split: make it a tensor, "
            "or, if its values are not those of samples, a tuple"
        )
    parts = []
    for leaf in leaves:
        if is_plain(leaf):
            parts.append([leaf] * num_microbatches)
        else:
            parts.append(leaf.tensor_split(num_microbatches))
    return [pytree.tree_unflatten(list(pieces), structure) for pieces in zip(*parts, strict=True)]


def largest_part(batch: Any, num_microbatches: int) -> int:
    """Samples of the largest micro-batch of a batch."""
    return _num_samples(cut(batch, num_microbatches)[0])


def feed_of(
    batch: tuple[Any, Any],
    num_microbatches: int,
    first_ordinal: int,
    mode: str,
    weigh: Weigh | None = None,
    before: Shapes | None = None,
) -> list[MicroBatch]:
    """The data of a step, split into micro-batches.

    Args:
        batch: (input, target).
        num_microbatches: of the step.
        first_ordinal: number of the first micro-batch since training began.
        mode: "train" or "eval"; a part of the signature for which shapes are agreed.
        weigh: from a target to the weight of its micro-batch.
        before: shapes of the batch before it in the same pass.

    Raises:
        DataError: the batch cannot be split so, or all its micro-batches have weight 0.
    """
    shapes = Shapes.of(batch[0] if batch[0] is batch[1] else batch, first_ordinal, before)
    inputs = cut(batch[0], num_microbatches)
    targets = cut(batch[1], num_microbatches, "the target")
    if weigh is None:
        weigh = _num_samples
    weights = [float(weigh(target)) for target in targets]
    total = sum(weights)
    if not total > 0:
        raise DataError(f"the micro-batches of a batch have weights {weights}; at least one must be more than 0")
    found = []
    signature = ""
    last = None
    for ordinal, (x, y, weight) in enumerate(zip(inputs, targets, weights, strict=True), first_ordinal):
        sizes = _num_samples(x), _num_samples(y)
        if sizes != last:
            # Parts of as many samples have the same shapes.
            signature = f"{mode} {described(x)} {described(y)}"
        last = sizes
        found.append(MicroBatch(x, y, weight / total, ordinal, signature, shapes))
    return found


def _num_samples(batch: Any) -> int:
    """Samples of the first tensor that has any; 1 where none has."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1


def weigh_of(loss: Callable[..., Any]) -> Weigh | None:
    """The weight that suits a loss: that of the targets which a mean cross entropy counts; None: samples."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction == "mean":
        return partial(_counted, ignored=loss.ignore_index, classes=loss.weight)
    ignored = ignored_target(loss)
    if ignored is None:
        return None
    return partial(_counted, ignored=ignored)


def _counted(target: Any, ignored: int, classes: Tensor | None = None) -> float:
    """The targets that are not ignored, by number or by the weights of their classes; others count as samples."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return _num_samples(target)
    counted = target.ne(ignored)
    if classes is None:
        return float(counted.sum())
    return float(classes[target[counted].to(classes.device)].sum())


def pair_of(batch: Any, trains: bool = False) -> tuple[Any, Any]:
    """A batch as (input, target); a dict of tensors is both.

    Args:
        batch: of the user.
        trains: it is for training.

    Raises:
        DataError: it is something else; or it trains, and gradients would have to go further than to its input.
    """
    if isinstance(batch, Mapping):
        tensors = {str(name): value for name, value in batch.items() if value is not None}
        pair = tensors, tensors
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        pair = batch[0], batch[1]
    else:
        raise DataError(f"a batch must be a pair (input, target) or a dict of tensors, got {type(batch).__name__}")
    if trains:
        _refuse_graphs(*pair)
    return pair


def _refuse_graphs(x: Any, y: Any) -> None:
    """Refuses gradients that would be lost: micro-batches and processes would need the graph behind a batch again."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            raise DataError(
                "the input was computed with gradients, which do not go further than to the input: detach() it, or "
                "make what computes it part of the model"
            )
    if y is x:
        return
    for leaf in pytree.tree_leaves(y):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise DataError("the target requires a gradient, which only the input can have: detach() the target")
