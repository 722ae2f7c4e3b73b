"""Weights of all ranks under the user's names, on every rank that asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipefit.runtime.collectives import broadcast
from pipefit.runtime.engine import Engine
from pipefit.runtime.worker import Worker
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer


def owner_of(plan: Plan, layer: int) -> tuple[int, int]:
    """The stage of a layer and the rank whose copy of it counts."""
    for index, stage in enumerate(plan.partition.stages):
        if layer in stage.layers:
            return index, plan.placement.ranks[index][0]
    raise IndexError(layer)


def full_state(engine: Engine, layers: Sequence[NamedLayer], plan: Plan) -> dict[str, Tensor]:
    """All weights and buffers by the user's names, in the model's order, on the CPU.

    In a distributed run every rank must call it: each tensor is broadcast by the rank that owns it.
    """
    mesh = engine.mesh
    workers = {worker.rank: worker for worker in engine.workers}
    result: dict[str, Tensor] = {}
    for layer in layers:
        stage, owner = owner_of(plan, layer.index)
        held = _state_of(workers[owner], stage) if owner in workers else {}
        for name, shaped in layer.module.state_dict(prefix=layer.dotted).items():
            if name in held:
                tensor = mesh.whole(name, held[name].detach()).contiguous()
            else:
                shape = mesh.whole_shape(name, shaped.shape)
                tensor = torch.empty(shape, dtype=shaped.dtype, device=engine.device)
            whole = broadcast(engine.session, tensor, mesh.process_of(owner))
            result[name] = whole.to("cpu", copy=True)
    return result


def _state_of(worker: Worker, stage: int) -> dict[str, Tensor]:
    """A stage's weights and buffers; of one that lives on a tier, copies."""
    if worker.spilling is None:
        return worker.stages[stage].state_dict()
    with worker.presence(stage):
        return {name: tensor.clone() for name, tensor in worker.stages[stage].state_dict().items()}


def forget_others(layers: Sequence[NamedLayer], held: set[int]) -> None:
    """Frees the weights of layers that no stage of this process holds; names and shapes stay, on the meta device."""
    kept = {id(p) for layer in layers if layer.index in held for p in layer.module.parameters()}
    for layer in layers:
        if layer.index not in held:
            for module in layer.module.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) not in kept:
                        module.register_parameter(name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to("meta")
