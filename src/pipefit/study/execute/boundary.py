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
    extra: dict[str, Any] = {"mbs": mbs, "flags": {}, "counts": {}}
    for mb in mbs:
        value = values[kind, stage, mb]
        leaves = value.leaves if isinstance(value, Message) else value
        tensors |= {f"{mb}.{index}": leaf for index, leaf in enumerate(leaves)}
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
        leaves = [record.tensors[f"{mb}.{index}"].to(device) for index in range(extra["counts"][str(mb)])]
        flags = extra["flags"].get(str(mb))
        found[kind, stage, mb] = leaves if flags is None else Message(leaves, list(flags), structure)
    return found


def _structure_of(text: str) -> Any:
    single = flatten(torch.empty(0))[1]
    spec = pytree.treespec_loads(text)
    return single if spec == single else spec
