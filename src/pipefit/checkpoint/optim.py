"""Optimizers and learning-rate schedules: their tensors and numbers, saved and restored by parameter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.sharded import OPTIM, put_state
from pipefit.errors import ModelError, PipefitError
from pipefit.runtime.worker import Worker
from pipefit.spec.files import JsonObject
from pipefit.stage.training import Owned

# Options for the speed of an optimizer: a run keeps its own, so that it may resume on another device.
_NOT_SAVED = ("params", "foreach", "fused", "capturable", "differentiable")
_CURE = "split the stages and group the parameters as in the run that saved, or load(…, weights_only=True)"

Read = Callable[[], Tensor]
"""Reads a saved tensor."""


def read_of(tensor: Tensor) -> Read:
    """The `Read` of a tensor that is in memory already."""
    return lambda: tensor


def parameter_and_key(name: str) -> tuple[str, str]:
    """The parameter and the key in the optimizer's state of a name in a file."""
    parameter, _, key = name.removeprefix(OPTIM).rpartition("/")
    return parameter, key


def weight_of(name: str) -> str:
    """The name of the weight or buffer to which a tensor in a file belongs."""
    if name.startswith(OPTIM):
        return parameter_and_key(name)[0]
    return name


def by_parameter(readers: Mapping[str, Read]) -> dict[str, dict[str, Read]]:
    """The states among saved tensors, by parameter and key."""
    states: dict[str, dict[str, Read]] = {}
    for name, read in readers.items():
        if name.startswith(OPTIM):
            parameter, key = parameter_and_key(name)
            states.setdefault(parameter, {})[key] = read
    return states


class _Trained(NamedTuple):
    """A whole parameter that an optimizer steps, or a part of it, under its saved name."""

    saved: str
    master: nn.Parameter
    owned: Owned


def _groups_of(worker: Worker, stage: int) -> list[list[_Trained]]:
    """The parameters of each group of a stage's optimizer."""
    store = worker.stores[stage]
    found = [
        _Trained(own.saved_name, master, own) for own, master in zip(worker.owned[stage], store.masters, strict=True)
    ]
    return [[found[index] for index in indices] for indices in store.groups(worker.optimizers[stage])]


def _trained_of(worker: Worker, stage: int) -> list[_Trained]:
    """All parameters that a stage's optimizer steps, in the model's order."""
    stepped = {id(trained.owned.parameter): trained for group in _groups_of(worker, stage) for trained in group}
    return [stepped[id(own.parameter)] for own in worker.owned[stage] if id(own.parameter) in stepped]


def optimizer_tensors(worker: Worker, stage: int, all_ties: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor) of the states of a stage's optimizer.

    Args:
        worker: the rank.
        stage: of the rank.
        all_ties: whether those of every tied weight are included; else only at the stage of its first name.
    """
    optimizer = worker.optimizers.get(stage)
    if optimizer is None:
        return
    for saved, master, owned in _trained_of(worker, stage):
        if all_ties or saved == owned.name:
            for key, value in optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    yield f"{OPTIM}{saved}/{key}", value


def optimization_of(worker: Worker, stages: Iterable[int]) -> list[Optimization]:
    """The numbers of some stages' optimizers and learning-rate schedules; none for stages that train nothing.

    Raises:
        PipefitError: an optimizer keeps a value that is neither a tensor nor JSON data.
    """
    result = []
    for stage in stages:
        if stage not in worker.optimizers:
            continue
        optimizer = worker.optimizers[stage]
        scheduler = worker.schedulers.get(stage)
        groups = []
        values: dict[str, JsonObject] = {}
        for group, members in zip(optimizer.param_groups, _groups_of(worker, stage), strict=True):
            options = {}
            for key, value in group.items():
                if key not in _NOT_SAVED:
                    options[key] = _plain(value, f"option {key} of the optimizer")
            groups.append({"parameters": [trained.saved for trained in members], "options": options})
        for saved, master, _ in _trained_of(worker, stage):
            for key, value in optimizer.state.get(master, {}).items():
                if not isinstance(value, Tensor):
                    plain = _plain(value, f"{key} of {saved} in the optimizer")
                    values.setdefault(saved, {})[key] = plain
        schedule = None
        kind = ""
        if scheduler:
            schedule = _plain(scheduler.state_dict(), "the learning-rate schedule")
            kind = type(scheduler).__name__
        result.append(Optimization(type(optimizer).__name__, groups, values, kind, schedule))
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
    """Saved JSON data in the type of the current value.

    Raises:
        ModelError: it is text where the current value is a number, or no such data.
    """
    if isinstance(value, str) and isinstance(template, int | float | Tensor):
        raise ModelError(f"the checkpoint has {value[:40]!r} where the optimizer or its schedule has {template}")
    if isinstance(value, dict):
        if isinstance(template, dict):
            known = template
        else:
            known = {}
        items: dict[Any, Any] = {}
        try:
            for key, item in value["items"]:
                if isinstance(key, list):
                    key = tuple(key)
                items[key] = item
        except (KeyError, TypeError, ValueError):
            raise ModelError(
                f"the checkpoint has {value!s:.40} where the optimizer or its schedule has {template}"
            ) from None
        result = {key: _like(item, known.get(key)) for key, item in items.items()}
        if isinstance(template, Counter):
            return Counter(result)
        return result
    if isinstance(value, list):
        known_items: Sequence[Any] = ()
        if isinstance(template, list | tuple):
            known_items = template
        every = [_like(item, known) for item, known in zip_longest(value, known_items[: len(value)])]
        if isinstance(template, tuple):
            return tuple(every)
        return every
    if isinstance(template, Tensor):
        return torch.full_like(template, value)
    return value


def restore_optimizer(
    worker: Worker, stage: int, records: Sequence[Optimization], tensors: Mapping[str, Mapping[str, Read]]
) -> Callable[[], None]:
    """Compares saved states with a stage's optimizer; returns the function that restores them.

    Args:
        worker: the rank.
        stage: of the rank.
        records: of all stages of the run that saved them; its stages may have been others.
        tensors: the saved tensors of optimizers, by parameter and key.

    Raises:
        ModelError: another optimizer, or settings that differ between parameters that now share a group.
    """
    optimizer = worker.optimizers[stage]
    store = worker.stores[stage]
    groups = list(zip(optimizer.param_groups, _groups_of(worker, stage), strict=True))
    origins = {}
    for record in records:
        for index, saved_group in enumerate(record.groups):
            for name in saved_group["parameters"]:
                origins[name] = _Origin(name, record, saved_group["options"], index)
    _check_kinds(worker, stage, [trained.saved for trained in _trained_of(worker, stage)], origins)
    found = [[origins[trained.saved] for trained in members] for _, members in groups]
    options = []
    for of_group, (group, _) in zip(found, groups, strict=True):
        given = []
        for origin in of_group:
            given.append(({k: _like(v, group.get(k)) for k, v in origin.options.items()}, origin.name))
        options.append(_same(given, "optimizer"))
    schedule: Any = None
    if scheduler := worker.schedulers.get(stage):
        template = scheduler.state_dict()
        whole = [(_like(o.record.schedule, template), o) for o in chain.from_iterable(found)]
        schedule = _merged(whole, template, found)

    def take() -> None:
        optimizer.state.clear()
        for (group, members), own in zip(groups, options, strict=True):
            group.update(own or {})
            for saved, master, _ in members:
                for key, value in origins[saved].record.values.get(saved, {}).items():
                    put_state(optimizer, store, master, key, _like(value, None))
                for key, read in tensors.get(saved, {}).items():
                    put_state(optimizer, store, master, key, read().to(_device_of(key, master, group)))
        if scheduler is not None:
            scheduler.load_state_dict(schedule)

    return take


class _Origin(NamedTuple):
    """The origin of a parameter's states: the record of its stage, and the options and number of its group there."""

    name: str
    record: Optimization
    options: JsonObject
    group: int


def _check_kinds(worker: Worker, stage: int, names: Sequence[str], origins: Mapping[str, _Origin]) -> None:
    optimizer = type(worker.optimizers[stage]).__name__
    schedule = ""
    if stage in worker.schedulers:
        schedule = type(worker.schedulers[stage]).__name__
    for name in names:
        if name not in origins:
            raise ModelError(f"the checkpoint has no optimizer state for {name}: it was not trained then")
        record = origins[name].record
        _check_kind("optimizer", record.optimizer, optimizer)
        _check_kind("learning-rate schedule", record.scheduler, schedule)


def _check_kind(what: str, was: str, now: str) -> None:
    if was != now:
        raise ModelError(
            f"the checkpoint's {what} is {was or 'none'}, this run's is {now or 'none'}; use the same, or load "
            "only the weights: load(…, weights_only=True)"
        )


def _same(values: Sequence[tuple[Any, str]], what: str) -> Any:
    """The common value of all parameters of a group or stage.

    Raises:
        ModelError: they differ.
    """
    for value, name in values[1:]:
        if value != values[0][0]:
            first = values[0][0]
            second = value
            if isinstance(first, dict) and isinstance(second, dict):
                key = next(k for k in {**first, **second} if first.get(k) != second.get(k))
                what = f"{key} of the {what}"
                first = first.get(key)
                second = second.get(key)
            raise ModelError(
                f"{what} was {first} for {values[0][1]} and {second} for {name}, which now belong together; {_CURE}"
            )
    if values:
        return values[0][0]
    return None


def _merged(values: Sequence[tuple[Any, _Origin]], template: Any, groups: Sequence[Sequence[_Origin]]) -> Any:
    """A schedule's state from those of the stages from which its parameters come.

    A list with one entry per parameter group is combined group by group, because the groups may be others now; all
    other values must be the same everywhere.
    """
    first = values[0][0]
    if isinstance(template, dict):
        merged_of = {}
        for key in dict.fromkeys(key for value, _ in values for key in value):
            merged_of[key] = _merged([(value.get(key), o) for value, o in values], template.get(key), groups)
        return type(first)(merged_of)
    if isinstance(template, list) and template and all(isinstance(item, dict) for item in template):
        items = []
        for index, item in enumerate(template):
            items.append(_merged([(value[index], o) for value, o in values], item, groups))
        return items
    by_group = all(isinstance(value, list) and len(value) == len(o.record.groups) for value, o in values)
    if by_group and isinstance(template, list) and len(template) == len(groups):
        by_name = {o.name: value for value, o in values}
        merged = list(template)  # a group without parameters in this stage keeps its own
        for index, own in enumerate(groups):
            if own:
                merged[index] = _same([(by_name[o.name][o.group], o.name) for o in own], "the schedule")
        return merged
    return _same([(value, o.name) for value, o in values], "the schedule")


def _device_of(key: str, master: nn.Parameter, group: dict[str, Any]) -> torch.device:
    """Step counters stay on the host, unless the optimizer runs wholly on its device."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    if on_host:
        return torch.device("cpu")
    return master.device
