"""Weights that several stages train."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipefit.spec import Partition
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Tie

__all__ = ["tied_layers", "tied_parameters"]


def tied_parameters(layers: Sequence[NamedLayer], partition: Partition) -> dict[str, Tie]:
    """Every name of a parameter that several stages train, with the first of its names.

    One that layers of a single stage share is like any other parameter of that stage.
    """
    stage_of = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
    return {
        name: Tie(found[0][0], parameter.shape, parameter.dtype)
        for found in _named_at(layers)
        if len({stage_of[layer] for _, _, layer in found}) > 1
        for name, parameter, _ in found
    }


def tied_layers(layers: Sequence[NamedLayer]) -> tuple[tuple[int, ...], ...]:
    """Groups of layers that train a weight together."""
    groups = {tuple(sorted({layer for _, _, layer in found})) for found in _named_at(layers)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def _named_at(layers: Sequence[NamedLayer]) -> list[list[tuple[str, nn.Parameter, int]]]:
    """Each trained parameter under all its names, with the index of the layer that has it so."""
    names: dict[int, list[tuple[str, nn.Parameter, int]]] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append((name, parameter, layer.index))
    return list(names.values())
