"""Tied weights: parameters that several layers or stages train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipefit.errors import ModelError
from pipefit.ir.instruction import Indices
from pipefit.spec import Partition
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.training import Tie

Uses = list[tuple[str, nn.Parameter, int]]
"""A parameter under all its names, with the index of the layer of each name."""


def tied_parameters(layers: Sequence[NamedLayer], partition: Partition) -> dict[str, Tie]:
    """Every name of a parameter that several stages train, with the first of its names.

    A parameter shared only by layers of one stage is like any other parameter of that stage.
    """
    stage_of = partition.stage_of
    ties: dict[str, Tie] = {}
    for found in _trained_at(layers):
        stages = {stage_of[layer] for _, _, layer in found}
        if len(stages) > 1:
            owner, parameter, layer = found[0]
            tie = Tie(owner, stage_of[layer], parameter.shape, parameter.dtype)
            ties.update((name, tie) for name, _, _ in found)
    return ties


def shared_parameters(stages: Mapping[int, Sequence[NamedLayer]], ties: Mapping[str, Tie]) -> set[int]:
    """The ids of the parameters of some stages that several of them use, or that are tied to other stages."""
    users: Counter[int] = Counter()
    tied = set()
    for layers in stages.values():
        users.update(map(id, joined(layers).parameters()))
        for layer in layers:
            for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
                if name in ties:
                    tied.add(id(parameter))
    return tied | {parameter for parameter, count in users.items() if count > 1}


def tied_layers(layers: Sequence[NamedLayer]) -> tuple[Indices, ...]:
    """Groups of layers that train a weight together."""
    groups = {tuple(sorted({layer for _, _, layer in found})) for found in _trained_at(layers)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def tied_groups(layers: Sequence[NamedLayer], partition: Partition) -> tuple[Indices, ...]:
    """Groups of stages that train a parameter together, in increasing order of their first stage.

    Groups that have a stage in common become one, so that each stage belongs to at most one.

    Raises:
        ModelError: stages share a batch norm: each would keep its own running averages.
    """
    stage_of = partition.stage_of
    _refuse_shared_batchnorm(layers, stage_of)
    users = [{stage_of[layer] for _, _, layer in found} for found in _trained_at(layers)]
    groups: list[set[int]] = []
    for stages in (stages for stages in users if len(stages) > 1):
        touching = [group for group in groups if group & stages]
        groups = [group for group in groups if group not in touching]
        groups.append(stages.union(*touching))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _refuse_shared_batchnorm(layers: Sequence[NamedLayer], stage_of: dict[int, int]) -> None:
    first: dict[int, NamedLayer] = {}
    for layer in layers:
        for module in layer.module.modules():
            known = first.setdefault(id(module), layer)
            if isinstance(module, _BatchNorm) and stage_of[known.index] != stage_of[layer.index]:
                raise ModelError(
                    f"layers {known.prefix} and {layer.prefix} share a batch norm but are in different stages, whose "
                    "running averages would differ; put both in one stage, or give each its own batch norm"
                )


def named_at(layers: Sequence[NamedLayer]) -> list[Uses]:
    """The uses of each parameter."""
    names: dict[int, Uses] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
            names.setdefault(id(parameter), []).append((name, parameter, layer.index))
    return list(names.values())


def _trained_at(layers: Sequence[NamedLayer]) -> list[Uses]:
    """The uses of each parameter that trains."""
    return [found for found in named_at(layers) if found[0][1].requires_grad]
