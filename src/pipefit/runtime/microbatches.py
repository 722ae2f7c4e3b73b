"""Batches cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.runtime.executor import Feed

Weigh = Callable[[Any], float]
"""How much a micro-batch counts in the mean of its batch, from its target: by default its number of samples."""


def cut(batch: Any, num_microbatches: int, what: str = "the batch") -> list[Any]:
    """A pytree of tensors, cut along their first dimension into nearly equal parts.

    Raises:
        DataError: there are fewer samples than micro-batches, or the tensors disagree on how many there are.
    """
    leaves, structure = pytree.tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise DataError(f"{what}: expected tensors whose first dimension counts samples, got {kinds}")
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        raise DataError(f"{what}: its tensors have {sorted(sizes)} samples; all need the same number")
    if (size := sizes.pop()) < num_microbatches:
        raise DataError(
            f"{what} has {size} samples, too few for {num_microbatches} micro-batches; "
            f"use a batch of at least {num_microbatches}, or at most {size} micro-batches"
        )
    parts = [leaf.tensor_split(num_microbatches) for leaf in leaves]
    return [pytree.tree_unflatten(list(pieces), structure) for pieces in zip(*parts, strict=True)]


def largest_part(batch: Any, num_microbatches: int) -> int:
    """Samples of the largest micro-batch of a batch."""
    return _num_samples(cut(batch, num_microbatches)[0])


def feed_of(
    batches: Sequence[tuple[Any, Any]], num_microbatches: int, first_ordinal: int, mode: str, weigh: Weigh | None = None
) -> Feed:
    """The data of a pass: each batch is one step's worth, cut into micro-batches.

    Args:
        batches: (input, target) of each step of the program.
        num_microbatches: per step.
        first_ordinal: number of the first micro-batch since training began.
        mode: "train" or "eval"; part of what shapes are agreed for.
        weigh: how much a micro-batch counts.
    """
    inputs: list[Any] = []
    targets: list[Any] = []
    shares: list[float] = []
    for x, y in batches:
        parts, wanted = cut(x, num_microbatches), cut(y, num_microbatches, "the target")
        weights = [float(weigh(target)) if weigh else float(_num_samples(target)) for target in wanted]
        total = sum(weights)
        if not total > 0:
            raise DataError(f"the micro-batches of a batch count {weights}; at least one must count more than 0")
        inputs += parts
        targets += wanted
        shares += [weight / total for weight in weights]
    signatures = [_number((mode, _shapes(x), _shapes(y))) for x, y in zip(inputs, targets, strict=True)]
    ordinals = range(first_ordinal, first_ordinal + len(inputs))
    return Feed(inputs, targets, shares, ordinals, signatures)


def _number(signature: Hashable) -> int:
    """A number that identifies the shapes of a micro-batch in this process: cheaper to look up than the shapes."""
    return _NUMBERS.setdefault(signature, len(_NUMBERS))


_NUMBERS: dict[Hashable, int] = {}


def _num_samples(target: Any) -> int:
    return int(pytree.tree_leaves(target)[0].shape[0])


def _shapes(payload: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    if isinstance(payload, Tensor):
        return ((payload.shape, payload.dtype),)
    return tuple((leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves(payload))


def pair_of(batch: Any) -> tuple[Any, Any]:
    """A batch as (input, target); a dict of tensors is both.

    Raises:
        DataError: it is something else.
    """
    if isinstance(batch, Mapping):
        tensors = {str(name): value for name, value in batch.items() if value is not None}
        return tensors, tensors
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(f"a batch must be a pair (input, target) or a dict of tensors, got {type(batch).__name__}")
    return batch[0], batch[1]
