"""Sizes of a model's layers: FLOP and parameters, and bytes on a device or a tier."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipefit.cost import LayerBytes, ModelBytes
from pipefit.profiling import analytic_profile
from pipefit.profiling.tensors import num_bytes
from pipefit.profiling.workload import Workload
from pipefit.spec import Device
from pipefit.spill.optimizer_states import StateSpec, probe_states
from pipefit.stage.record_layout import laid_out_bytes
from pipefit.stage.split import NamedLayer
from pipefit.stage.ties import tied_layers
from pipefit.stage.training import MakeOptimizer

_log = getLogger("pipefit.plan")


def layer_costs(work: Workload) -> list[float]:
    """The cost of each layer, by which stages are balanced where nothing is measured; the same on every rank.

    With an example these are FLOP of its forward, and one for each parameter, which a step changes.
    Without an example, or where the FLOP cannot be counted, parameters count alone.
    """
    costs = [0.0] * len(work.layers)
    if work.example is not None:
        costs = _flop_of(work.layers, work.example[0])
    for index, layer in enumerate(work.layers):
        costs[index] += sum(p.numel() for p in layer.module.parameters() if not is_lazy(p))
    return costs


def _flop_of(layers: Sequence[NamedLayer], x: Any) -> list[float]:
    """FLOP of each layer; 0 for all where they cannot be counted."""
    # On a device of one FLOP per second, seconds are FLOP.
    one = Device(flops=1.0, efficiency=1.0)
    try:
        # Copies: a layer may note something in its forward.
        copies = [replace(layer, module=_without_data(layer.module)) for layer in layers]
        profile = analytic_profile(copies, x, one)
    except Exception as problem:  # a layer of the user's may raise anything on tensors without data
        _log.debug("stages are balanced by parameters: FLOP are not counted: %s", problem)
        return [0.0] * len(layers)
    return [layer.total_s for layer in profile.layers]


def _without_data(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have no data."""
    known = {}
    for tensor in (*module.parameters(), *module.buffers()):
        known[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copy.deepcopy(module, known)


def _states_by(optimizer: MakeOptimizer) -> Callable[[Sequence[nn.Parameter]], list[StateSpec]]:
    """A function from parameters to the optimizer's states for them, computed once for equal shapes and types."""
    known = {}

    def states(parameters: Sequence[nn.Parameter]) -> list[StateSpec]:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        key = tuple((parameter.shape, parameter.dtype) for parameter in trained)
        if key not in known:
            known[key] = probe_states(optimizer, trained, torch.device("cpu"))
        return known[key]

    return states


def state_per_weight(layers: Sequence[NamedLayer], optimizer: MakeOptimizer) -> float:
    """Bytes that an optimizer keeps for each byte of weights; of identical layers one is examined."""
    states_of = _states_by(optimizer)
    weights = states = 0.0
    for layer in layers:
        parameters = list(layer.module.parameters())
        weights += num_bytes(parameter for parameter in parameters if parameter.requires_grad)
        states += num_bytes(spec.like for spec in states_of(parameters))
    if weights:
        return states / weights
    return 0.0


def sizes_of(layers: Sequence[NamedLayer], optimizer: MakeOptimizer, copies: int = 1) -> ModelBytes:
    """Exact bytes of the layers.

    Args:
        layers: of the whole model.
        optimizer: of a stage.
        copies: of the pipeline; gradients that they sum are in buckets.
    """
    states_of = _states_by(optimizer)

    def taken(parameters: Sequence[nn.Parameter], staying: float = 0.0) -> LayerBytes:
        def record(some: Sequence[nn.Parameter]) -> float:
            size = laid_out_bytes(some)
            if copies > 1:
                # Buckets also need rounding, and a mark for each parameter; see `parallel.buckets`.
                size += sum(17 * parameter.itemsize for parameter in some)
            return size

        trained = [parameter for parameter in parameters if parameter.requires_grad]
        states = laid_out_bytes(spec.like for spec in states_of(parameters))
        return LayerBytes(record(parameters), states, staying, len(trained), record(trained))

    found = []
    for layer in layers:
        found.append(taken(list(layer.module.parameters()), num_bytes(layer.module.buffers())))
    ties = []
    for group in tied_layers(layers):
        ties.append((group, taken(_shared([layers[index] for index in group]))))
    return ModelBytes(tuple(found), tuple(ties))


def _shared(layers: Sequence[NamedLayer]) -> list[nn.Parameter]:
    """The trained parameters that all of these layers have."""
    users = Counter(id(p) for layer in layers for p in layer.module.parameters())
    return [p for p in layers[0].module.parameters() if p.requires_grad and users[id(p)] == len(layers)]
