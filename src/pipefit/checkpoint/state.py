"""The named tensors of a rank, whether they are resident, spilled, or sharded over tensor-parallel processes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipefit.checkpoint.optim import optimizer_tensors, parameter_and_key
from pipefit.checkpoint.sharded import Sharing
from pipefit.errors import ModelError
from pipefit.runtime.worker import Worker
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Tensors


def saved_stages(plan: Plan, worker: Worker, among: Container[int] | None = None) -> list[int]:
    """The stages that this rank saves: those of which it is the first replica, of all or among some ranks."""
    found = []
    for stage in worker.stages:
        replicas = [rank for rank in plan.placement.ranks[stage] if among is None or rank in among]
        if replicas[0] == worker.rank:
            found.append(stage)
    return found


def tensors_of(layers: Iterable[NamedLayer]) -> Tensors:
    """Weights and buffers of layers under the user's names.

    Raises:
        ModelError: a module has a value in its state that is not a tensor.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        found |= layer.module.state_dict(prefix=layer.dotted)
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name} is a {type(value).__name__} in the model's state; only tensors can be saved: "
                "make it a tensor, or leave it out of get_extra_state"
            )
    return found


def weights_of(worker: Worker, stage: int) -> Iterator[tuple[str, str, Tensor]]:
    """(the user's name, the name it is saved under, weight or buffer) of one stage, as they are now.

    A parameter with several names is saved under the first in the model's order. Ties with other stages are in the
    worker.

    Raises:
        ModelError: see `tensors_of`.
    """
    first: dict[int, str] = {}
    saved = {}
    layers = worker.stages[stage].layers
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix, remove_duplicate=False):
            saved[name] = first.setdefault(id(parameter), name)
    for name, value in tensors_of(layers).items():
        known = saved.get(name, name)
        if known in worker.ties:
            known = worker.ties[known].owner
        yield name, known, value


def saved_names(worker: Worker, stage: int) -> list[str]:
    """The names under which the weights and buffers of a stage are saved, in their order."""
    return [name for name, saved, _ in weights_of(worker, stage) if name == saved]


def aliases_of(worker: Worker, stages: Iterable[int]) -> dict[str, str]:
    """Further names of tied weights, each with the name it is saved under."""
    found: dict[str, str] = {}
    for stage in stages:
        found |= {name: saved for name, saved, _ in weights_of(worker, stage) if name != saved}
    return found


def _named(worker: Worker, stage: int) -> Iterator[tuple[str, str, Tensor]]:
    """(name, the weight with the same sharding, tensor) of all saved tensors of a stage, as they are now.

    The weight is "" for a tensor that every process of the rank holds whole.
    """
    shapes = {owned.name: owned.parameter.shape for owned in worker.owned[stage]}
    for name, saved, value in weights_of(worker, stage):
        if name == saved:
            yield name, name, value
    for name, value in optimizer_tensors(worker, stage):
        weight = parameter_and_key(name)[0]
        if value.shape != shapes.get(weight, value.shape):
            weight = ""
        yield name, weight, value


def saved_forms(worker: Worker, stage: int) -> Tensors:
    """Tensors of the saved shapes and types of a stage, by name, without meaningful values."""
    forms = {}
    for name, weight, value in _named(worker, stage):
        shape = worker.mesh.whole_shape(weight, value.shape)
        if shape == value.shape:
            forms[name] = value
        else:
            forms[name] = torch.empty(shape, dtype=value.dtype, device="meta")
    return forms


def saved_tensors(worker: Worker, stage: int, sharing: Sharing) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what is saved of a stage, whole, in the order of `saved_forms`; each is valid until the next.

    A spilled stage is on the device meanwhile. All processes of a tensor-parallel rank must walk them together, and
    other replicas must send their parts of them.
    """
    with worker.presence(stage, optim=True):
        for name, weight, value in _named(worker, stage):
            yield name, worker.mesh.whole(weight, sharing.whole(stage, name, value))
