"""Weights that several stages train."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipefit.runtime.worker import Tie
from pipefit.spec import Partition
from pipefit.stage.split import NamedLayer

__all__ = ["tied_parameters"]


def tied_parameters(layers: Sequence[NamedLayer], partition: Partition) -> dict[str, Tie]:
    """Every name of a parameter that several stages train, with the first of its names.

    One that layers of a single stage share is like any other parameter of that stage.
    """
    stage_of = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
    names: dict[int, list[tuple[str, nn.Parameter, int]]] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append((name, parameter, stage_of[layer.index]))
    return {
        name: Tie(found[0][0], parameter.shape, parameter.dtype)
        for found in names.values()
        if len({stage for _, _, stage in found}) > 1
        for name, parameter, _ in found
    }
