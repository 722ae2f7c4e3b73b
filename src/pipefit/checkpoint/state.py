"""What a rank has to save, by the user's names, and how it takes it back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipefit.checkpoint.manifest import Optimization
from pipefit.errors import ModelError, PipefitError
from pipefit.runtime.engine import Engine
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Owned, Training, Worker
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer

__all__ = ["OPTIM", "Trained", "aliases_of", "optimization_of", "restore_optimizer", "tensors_of", "weights_of"]

OPTIM = "optim/"
# How an optimizer computes, not what: a run keeps its own, so that it may go on with another device.
_MANNERS = ("params", "foreach", "fused", "capturable", "differentiable")


class Trained(Protocol):
    """What is saved and loaded: a `pipefit.Pipeline`."""

    layers: list[NamedLayer]
    plan: Plan
    num_updates: int
    _engine: Engine
    _session: Session
    _training: Training
    _next_ordinal: int


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


def _is_first(plan: Plan, worker: Worker, stage: int) -> bool:
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
        if not _is_first(pipeline.plan, worker, stage):
            continue
        known = aliases_of(worker.stages[stage].layers)
        for name, saved, value in weights_of(worker, known, stage):
            if name == saved:
                tensors[name] = value
            else:
                aliases[name] = saved
        if optimizer:
            tensors.update(_optimizer_tensors(worker, stage))
    return tensors, aliases


def _saved_name(owned: Owned) -> str:
    return owned.tie.owner if owned.tie else owned.name


def _trained(worker: Worker, stage: int) -> list[tuple[str, nn.Parameter, Owned]]:
    """(saved name, what the optimizer steps, parameter) of all that a stage's optimizer steps."""
    stepped = {id(p) for group in worker.optimizers[stage].param_groups for p in group["params"]}
    pairs = zip(worker.owned[stage], worker.stores[stage].masters, strict=True)
    return [(_saved_name(own), master, own) for own, master in pairs if id(master) in stepped]


def _optimizer_tensors(worker: Worker, stage: int) -> Iterator[tuple[str, Tensor]]:
    optimizer = worker.optimizers.get(stage)
    if optimizer is None:
        return
    for saved, master, owned in _trained(worker, stage):
        if saved == owned.name:
            for key, value in optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    yield f"{OPTIM}{saved}/{key}", value


def optimization_of(pipeline: Trained, worker: Worker) -> list[Optimization]:
    """The numbers of this rank's optimizers and learning-rate schedules.

    Raises:
        PipefitError: an optimizer keeps something that is neither a tensor nor JSON data.
    """
    result = []
    for stage, optimizer in worker.optimizers.items():
        if not _is_first(pipeline.plan, worker, stage):
            continue
        names = {id(master): saved for saved, master, _ in _trained(worker, stage)}
        groups = [
            {
                "parameters": [names[id(p)] for p in group["params"]],
                "options": {
                    k: _plain(v, f"option {k} of the optimizer") for k, v in group.items() if k not in _MANNERS
                },
            }
            for group in optimizer.param_groups
        ]
        values = {
            saved: {
                key: _plain(value, f"{key} of {saved} in the optimizer")
                for key, value in optimizer.state.get(master, {}).items()
                if not isinstance(value, Tensor)
            }
            for saved, master, _ in _trained(worker, stage)
        }
        scheduler = worker.schedulers.get(stage)
        result.append(
            Optimization(
                type(optimizer).__name__,
                groups,
                {name: found for name, found in values.items() if found},
                type(scheduler).__name__ if scheduler else "",
                _plain(scheduler.state_dict(), "the learning-rate schedule") if scheduler else None,
            )
        )
    return result


def _plain(value: Any, what: str) -> Any:
    """JSON data that `_like` turns back."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {"items": [[_plain(k, what), _plain(v, what)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise PipefitError(
            f"{what} is a {type(value).__name__}, which cannot be saved: a checkpoint holds tensors and JSON data"
        ) from None
    return value


def _like(value: Any, template: Any) -> Any:
    """Saved JSON data in the type of what stands there now."""
    if isinstance(value, dict):
        known = template if isinstance(template, dict) else {}
        items = {(tuple(k) if isinstance(k, list) else k): v for k, v in value["items"]}
        result = {k: _like(v, known.get(k)) for k, v in items.items()}
        return Counter(result) if isinstance(template, Counter) else result
    if isinstance(value, list):
        some = template if isinstance(template, list | tuple) else ()
        result = [_like(item, some[i] if i < len(some) else None) for i, item in enumerate(value)]
        return tuple(result) if isinstance(template, tuple) else result
    if isinstance(template, Tensor):
        return torch.full_like(template, value)
    return value


def restore_optimizer(
    worker: Worker, stage: int, records: Sequence[Optimization], tensors: Mapping[str, Callable[[], Tensor]]
) -> Callable[[], None]:
    """Checks what was saved against a stage's optimizer and gives the function that takes it over.

    Args:
        worker: the rank.
        stage: of the rank.
        records: of all stages of the run that saved them; it may have been cut in other places.
        tensors: how to read each saved tensor of optimizers: "optim/<parameter>/<key>".

    Raises:
        ModelError: another optimizer, or settings that differ between parameters that now share a group.
    """
    optimizer = worker.optimizers[stage]
    trained = _trained(worker, stage)
    names = {id(master): saved for saved, master, _ in trained}
    sources = {name: record for record in records for name in record.names}
    if missing := [saved for saved, _, _ in trained if saved not in sources]:
        raise ModelError(f"the checkpoint has no optimizer state for {missing[0]}: it was not trained then")
    if kinds := {sources[s].optimizer for s, _, _ in trained} - {type(optimizer).__name__}:
        raise ModelError(
            f"the checkpoint's optimizer is {kinds.pop()}, this run's is {type(optimizer).__name__}; use the same, or "
            "load only the weights: load(…, weights_only=True)"
        )
    options = [_options_for(group, names, records) for group in optimizer.param_groups]
    schedule = _schedule_for(worker, stage, [sources[saved] for saved, _, _ in trained])

    def take() -> None:
        for group, found in zip(optimizer.param_groups, options, strict=True):
            for key, value in found.items():
                group[key] = _like(value, group.get(key))
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        optimizer.state.clear()
        for saved, master, _ in trained:
            state: dict[str, Any] = {k: _like(v, None) for k, v in sources[saved].values.get(saved, {}).items()}
            prefix = f"{OPTIM}{saved}/"
            for full, read in tensors.items():
                if full.startswith(prefix):
                    key = full.removeprefix(prefix)
                    state[key] = read().to(_device_of(key, master, groups.get(id(master), {})))
            if state:
                optimizer.state[master] = state
        if schedule is not None:
            scheduler = worker.schedulers[stage]
            scheduler.load_state_dict(_like(schedule, scheduler.state_dict()))

    return take


def _device_of(key: str, master: nn.Parameter, group: dict[str, Any]) -> torch.device:
    """Step counters stay on the host, unless the optimizer runs wholly on its device."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else master.device


def _options_for(group: dict[str, Any], names: dict[int, str], records: Sequence[Optimization]) -> dict[str, Any]:
    mine = {names[id(p)] for p in group["params"]}
    groups = [g for record in records for g in record.groups if mine & set(g["parameters"])]
    found = [(g["options"], g["parameters"]) for g in groups]
    for options, parameters in found[1:]:
        if options != found[0][0]:
            different = next(k for k in options if options[k] != found[0][0].get(k))
            raise ModelError(
                f"{different} of the optimizer was {found[0][0].get(different)} for {found[0][1][0]} and "
                f"{options[different]} for {parameters[0]}, which one group of this run holds; cut the stages, or "
                "group the parameters, as in the run that saved, or load only the weights: load(…, weights_only=True)"
            )
    return found[0][0] if found else {}


def _schedule_for(worker: Worker, stage: int, sources: Sequence[Optimization]) -> Any:
    scheduler: Any = worker.schedulers.get(stage)
    kind = type(scheduler).__name__ if scheduler else ""
    for source in sources:
        if source.scheduler != kind:
            raise ModelError(
                f"the checkpoint's learning-rate schedule is {source.scheduler or 'none'}, this run's is "
                f"{kind or 'none'}; use the same, or load only the weights: load(…, weights_only=True)"
            )
        if source.schedule != sources[0].schedule:
            raise ModelError(
                f"the schedules of {source.names[0]} and {sources[0].names[0]} stood at different points; "
                "cut the stages as in the run that saved, or load only the weights: load(…, weights_only=True)"
            )
    return sources[0].schedule if scheduler is not None else None
