"""What a rank has to save, by the user's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from pipefit.checkpoint.optim import OPTIM, optimizer_tensors
from pipefit.checkpoint.spilled_tensors import StagedTensors
from pipefit.errors import ModelError
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training

__all__ = ["Trained", "aliases_of", "is_first", "tensors_of", "weights_of"]


class Trained(Protocol):
    """What is saved and loaded: a `pipefit.Pipeline`."""

    layers: list[NamedLayer]
    plan: Plan
    num_updates: int
    _session: Session
    _training: Training
    _next_ordinal: int

    @property
    def workers(self) -> Sequence[Worker]:
        """The ranks that this process runs."""


def aliases_of(layers: Sequence[NamedLayer]) -> dict[str, str]:
    """Every further name of a parameter that has several, with its first name in the model's order.

    On a rank that holds only a part of the model, names of parameters held elsewhere may miss; all ranks together know
    all of them.
    """
    first: dict[int, str] = {}
    result: dict[str, str] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix, remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner != name:
                result[name] = owner
    return result


def _names(worker: Worker, aliases: Mapping[str, str]) -> Callable[[str], str]:
    """From any name to the one it is saved under: ties between stages are known to the worker, others by identity."""

    def canonical(name: str) -> str:
        name = aliases.get(name, name)
        return worker.ties[name].owner if name in worker.ties else name

    return canonical


def is_first(plan: Plan, worker: Worker, stage: int) -> bool:
    """Whether this rank's copy of a stage is the one that is saved."""
    return plan.placement.ranks[stage][0] == worker.rank


def weights_of(worker: Worker, aliases: Mapping[str, str], stage: int) -> Iterator[tuple[str, str, Tensor]]:
    """(the user's name, the name it is saved under, weight or buffer) of one stage.

    Raises:
        ModelError: a module keeps something in its state that is not a tensor.
    """
    canonical = _names(worker, aliases)
    for name, value in worker.stages[stage].state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name} is a {type(value).__name__} in the model's state; only tensors can be saved: "
                "make it a tensor, or leave it out of get_extra_state"
            )
        yield name, canonical(name), value


def tensors_of(pipeline: Trained, worker: Worker, optimizer: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that this rank saves, and the further names of tied weights it knows."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for stage in worker.stages:
        if not is_first(pipeline.plan, worker, stage):
            continue
        known = aliases_of(worker.stages[stage].layers)
        for name, saved, value in weights_of(worker, known, stage):
            if name == saved:
                tensors[name] = value
            else:
                aliases[name] = saved
        if optimizer:
            tensors.update(optimizer_tensors(worker, stage))
    if worker.spilling:
        mine = [stage for stage in worker.stages if is_first(pipeline.plan, worker, stage)]
        return StagedTensors(worker, mine, lambda stage: _stage_tensors(worker, stage, optimizer)), aliases
    if worker.mesh.tensor > 1:
        tensors = _whole(worker, tensors)
        aliases = aliases if worker.mesh.is_first else {}
    return tensors, aliases


def _stage_tensors(worker: Worker, stage: int, optimizer: bool) -> dict[str, Tensor]:
    """What is saved of one stage, by name."""
    known = aliases_of(worker.stages[stage].layers)
    tensors = {name: value for name, saved, value in weights_of(worker, known, stage) if name == saved}
    return tensors | (dict(optimizer_tensors(worker, stage)) if optimizer else {})


def _whole(worker: Worker, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from those of the processes that share the rank, on the one that speaks for it."""
    shapes = {owned.name: owned.parameter.shape for own in worker.owned.values() for owned in own}
    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        weight = name.removeprefix(OPTIM).rpartition("/")[0] if name.startswith(OPTIM) else name
        if value.shape == shapes.get(weight, value.shape):
            value = worker.mesh.whole(weight, value)
        if worker.mesh.is_first:
            result[name] = value
    return result
