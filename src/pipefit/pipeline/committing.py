"""How often a spilled run is committed to its disk, where nobody says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipefit.checkpoint.committed import MOST_BYTES
from pipefit.ir.program import Header
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.pipeline.spill_options import Spilled
from pipefit.spec.plan import Partition
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer

__all__ = ["SELDOM", "commit_every"]

SELDOM = 10
"""Steps between two commits where these write more than the steps do."""


def commit_every(
    spill: Spilled | None, header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> int:
    """Steps from one commit to the next; the same on all ranks, for it follows from the whole model.

    Args:
        spill: what is asked for.
        header: of the program.
        layers: of the whole model.
        partition: layers of each stage.
        optimizer: makes the optimizer of some parameters.
    """
    if spill is None or spill.where.folder is None:
        return 1
    if spill.commit_every is not None:
        return spill.commit_every
    if spill.where.host_bytes is not None:
        return SELDOM
    return SELDOM if _staying_bytes(header, layers, partition, optimizer) > MOST_BYTES else 1


def _staying_bytes(
    header: Header, layers: Sequence[NamedLayer], partition: Partition, optimizer: MakeOptimizer
) -> float:
    """Bytes of the weights and states that stay on the devices, as far as they are known before the first step."""
    users = Counter(id(p) for layer in layers for p in layer.module.parameters())
    passed: set[int] = set()
    staying = 0.0
    stepping: list[NamedLayer] = []
    for stage, part in enumerate(partition.stages):
        for layer in (layers[index] for index in part.layers):
            for parameter in layer.module.parameters():
                stays = not header.is_spilled(stage) or users[id(parameter)] > 1
                if stays and id(parameter) not in passed:
                    staying += parameter.nbytes
                passed.add(id(parameter))
            if header.keeps_states(stage) or not header.is_spilled(stage):
                stepping.append(layer)
    weights = sum({id(p): p.nbytes for layer in stepping for p in layer.module.parameters()}.values())
    return staying + weights * state_per_weight(stepping, optimizer)
