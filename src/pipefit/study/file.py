"""Study files: TOML in, a checked study out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipefit.errors import nearest
from pipefit.spec.files import parse_toml, read_text
from pipefit.study.stopping import HELD_OUT, LOSS, RULES, Rule
from pipefit.study.trial import StudyError, StudySpec, Trial, file_name
from pipefit.units import parse_quantity

__all__ = ["grid", "load_study", "rule_of", "study_of"]

_FORMAT = "pipefit.study/1"
_STUDY = ("format", "name", "workers", "policy", "device_memory", "memory", "tier", "threads", "output", "device")
_TABLES = ("grid", "trials", "stop")
_TRIAL = tuple(f.name for f in fields(Trial) if f.name not in ("name", "loss", "scheduler", "held_out", "values"))
_OPTIONS = "options"


def load_study(path: str | Path) -> StudySpec:
    """Reads a study file.

    Raises:
        PipefitError: it is missing or not TOML, a key is unknown (the nearest is suggested), or a value does not fit.
    """
    data = parse_toml(read_text(path), StudyError, str(path))
    found = data.get("format", _FORMAT)
    if found != _FORMAT:
        raise StudyError(f'{path}: expected format = "{_FORMAT}", got {found!r}; is this another kind of file?')
    return study_of(data, str(path))


def study_of(data: Mapping[str, Any], where: str = "study") -> StudySpec:
    """A study from what its file says.

    Raises:
        PipefitError: with `where` and the key.
    """
    _known(data, (*_STUDY, *_TABLES, *_TRIAL), where)
    trials = tuple(_trials(data, where))
    _different(trials, where)
    try:
        return StudySpec(
            trials,
            workers=data.get("workers", 2),
            policy=data.get("policy", "lrtf"),
            device_memory_bytes=_bytes(data, "device_memory", where),
            tier=data.get("tier", "disk"),
            tier_bytes=_bytes(data, "memory", where),
            threads=data.get("threads", 0),
            stop=rule_of(data["stop"], f"{where}: stop") if "stop" in data else None,
            output=_text(data, "output", f"runs/{data.get('name', 'study')}", where),
            name=_text(data, "name", "study", where),
            device=_text(data, "device", "", where),
        )
    except StudyError as problem:
        raise problem if str(problem).startswith(where) else StudyError(f"{where}: {problem}") from None


def grid(space: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of some keys, the last key fastest.

    >>> [point for point in grid({"lr": [0.1, 0.2], "batch": [8]})]
    [{'lr': 0.1, 'batch': 8}, {'lr': 0.2, 'batch': 8}]
    """
    keys = list(space)
    for values in itertools.product(*(list(space[key]) for key in keys)):
        yield dict(zip(keys, values, strict=True))


def rule_of(data: Any, where: str = "stop") -> Rule:
    """A stopping rule from its table: `rule`, and the rule's own numbers.

    Raises:
        StudyError: an unknown rule or key, or a number that does not fit.
    """
    if not isinstance(data, Mapping) or "rule" not in data:
        raise StudyError(f"{where}: expected a table with rule = {' or '.join(map(repr, RULES))}")
    kind = RULES.get(str(data["rule"]))
    if kind is None:
        raise StudyError(f"{where}: unknown rule {data['rule']!r}; {nearest(str(data['rule']), RULES)}")
    numbers = {key: value for key, value in data.items() if key != "rule"}
    parameters = inspect.signature(kind).parameters
    _known(numbers, tuple(parameters), where)
    for key, value in numbers.items():
        if key == "on":
            if value not in (LOSS, HELD_OUT):
                raise StudyError(f"{where}: on: expected {LOSS!r} or {HELD_OUT!r}, got {value!r}")
            continue
        least = {"factor": 2, "min_steps": 0, "least": 0}.get(key, 1)
        fits = isinstance(value, int) or (isinstance(value, float) and key == "least")
        if not fits or isinstance(value, bool) or value < least:
            raise StudyError(f"{where}: {key}: expected a number of at least {least}, got {value!r}")
    return kind(**numbers)


def _trials(data: Mapping[str, Any], where: str) -> Iterator[Trial]:
    shared = {key: data[key] for key in _TRIAL if key in data}
    listed = data.get("trials", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
        raise StudyError(f"{where}: trials: expected [[trials]] tables, one for each trial")
    space = _space(data["grid"], f"{where}: grid") if "grid" in data else {}
    for index, own in enumerate(listed):
        place = f"{where}: trials[{index}]" if "trials" in data else where
        _known(own, ("name", *_TRIAL), place)
        for point in grid(space):
            yield _trial(shared, own, point, place, alone=not space)


def _space(given: Any, where: str) -> dict[str, list[Any]]:
    """The lists of a grid; those of the model's options as `options.NAME`."""
    if not isinstance(given, dict) or not given:
        raise StudyError(f"{where}: expected a table of lists, such as lr = [1e-3, 3e-4], got {given!r}")
    space: dict[str, Any] = {}
    for key, values in given.items():
        nested = key == _OPTIONS and isinstance(values, dict)
        space |= {f"{_OPTIONS}.{name}": own for name, own in values.items()} if nested else {key: values}
    for key, values in space.items():
        head, _, option = key.partition(".")
        _known({head: values}, _TRIAL, where)
        if (head == _OPTIONS) != bool(option):
            raise StudyError(f"{where}: {key}: options of the model stand by name, as in options.width = [64, 128]")
        if not isinstance(values, list) or not values:
            raise StudyError(f"{where}: {key}: expected a list of values, as in lr = [1e-3, 3e-4], got {values!r}")
    return space


def _different(trials: Iterable[Trial], where: str) -> None:
    """Refuses a training that is listed twice: it would give the same numbers twice."""
    seen: dict[str, str] = {}
    for number, trial in enumerate(trials):
        name, what = file_name(number, trial), {**trial.told(), "name": "", "values": {}}
        before = seen.setdefault(repr(sorted(what.items())), name)
        if before != name:
            raise StudyError(f"{where}: {before} and {name} are the same training: change a value, or its seed")


def _trial(
    shared: Mapping[str, Any], own: Mapping[str, Any], point: Mapping[str, Any], where: str, alone: bool
) -> Trial:
    options = {**_table(shared.get(_OPTIONS, {}), where), **_table(own.get(_OPTIONS, {}), where)}
    settings = {**shared, **{key: value for key, value in own.items() if key != _OPTIONS}}
    values = {key: value for key, value in own.items() if key not in ("name", _OPTIONS)}
    values |= _table(own.get(_OPTIONS, {}), where)
    for key, value in point.items():
        head, _, option = key.partition(".")
        if head == _OPTIONS:
            options[option] = value
        else:
            settings[key] = value
        values[option or key] = value
    name = settings.pop("name", "")
    if name and not alone:
        name = "-".join([str(name), *(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())])
    if isinstance(settings.get("data"), list):
        settings["data"] = tuple(settings["data"])
    try:
        return Trial(**{**settings, "name": name, _OPTIONS: options, "values": values})
    except StudyError as problem:
        raise StudyError(f"{where}: {problem}") from None


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StudyError(f"{where}: {_OPTIONS}: expected a table such as {{layers = 4}}, got {value!r}")
    return dict(value)


def _text(data: Mapping[str, Any], key: str, default: str, where: str) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise StudyError(f"{where}: {key}: expected text, got {value!r}")
    return value


def _bytes(data: Mapping[str, Any], key: str, where: str) -> float:
    value = parse_quantity(data[key], "bytes", f"{where}: {key}") if key in data else 0.0
    if key in data and not 0 < value < float("inf"):
        raise StudyError(f"{where}: {key}: expected more than 0 bytes, got {data[key]!r}")
    return value


def _known(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in data:
        if key not in known:
            raise StudyError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
