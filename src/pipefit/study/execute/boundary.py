"""What waits between two shards of a trial: activations and gradients of all micro-batches, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.runtime.transport import Message
from pipefit.stage.payload import flatten
from pipefit.study.execute.records import Record

__all__ = ["packed", "unpacked"]


def packed(
    kind: str, stage: int, mbs: list[int], values: Mapping[Any, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Activations or gradients of a boundary as a record."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {"mbs": mbs, "flags": {}, "counts": {}, "orders": {}}
    for mb in mbs:
        value = values[kind, stage, mb]
        leaves = value.leaves if isinstance(value, Message) else value
        for index, leaf in enumerate(leaves):
            order = _order(leaf)
            tensors[f"{mb}.{index}"] = leaf.permute(order)
            extra["orders"][f"{mb}.{index}"] = order
        extra["counts"][str(mb)] = len(leaves)
        if isinstance(value, Message):
            extra["flags"][str(mb)] = list(value.flags)
            extra["structure"] = pytree.treespec_dumps(value.structure)
    return tensors, extra


def unpacked(kind: str, stage: int, record: Record, device: torch.device) -> dict[tuple[str, int, int], Any]:
    """The executor's values that `packed` has put away."""
    extra = record.extra
    structure = _structure_of(extra["structure"]) if "structure" in extra else None
    found: dict[tuple[str, int, int], Any] = {}
    for mb in extra["mbs"]:
        names = [f"{mb}.{index}" for index in range(extra["counts"][str(mb)])]
        leaves = [_reordered(record.tensors[name], extra["orders"][name]).to(device) for name in names]
        flags = extra["flags"].get(str(mb))
        found[kind, stage, mb] = leaves if flags is None else Message(leaves, list(flags), structure)
    return found


def _order(tensor: Tensor) -> list[int]:
    """The dimensions as they lie in memory: it comes back so, for what computes with it may add up so.

    One that has gaps, or lies twice in the same place, is copied in the order of its dimensions.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))


def _reordered(tensor: Tensor, order: list[int]) -> Tensor:
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def _structure_of(text: str) -> Any:
    single = flatten(torch.empty(0))[1]
    spec = pytree.treespec_loads(text)
    return single if spec == single else spec
