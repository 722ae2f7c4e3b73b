"""Study files: TOML in, a checked study out. Python takes the same options by the same names."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipefit.errors import look_up
from pipefit.spec.arguments import check_fields
from pipefit.spec.files import check_format, parse_toml, read_text
from pipefit.study.stopping import RULES, Rule
from pipefit.study.trial import StudyError, StudySpec, Trial, Values, at, file_name

_STUDY = tuple(f.name for f in fields(StudySpec) if f.name != "trials")
_TRIAL = tuple(f.name for f in fields(Trial) if f.name not in ("name", "loss", "scheduler", "held_out", "values"))
_OPTIONS = "options."
MOST_TRIALS = 10_000
"""Most trials of a study file."""


def load_study(path: str | Path) -> StudySpec:
    """Reads a study file.

    Raises:
        PipefitError: it is missing or not TOML, a key is unknown (the nearest is suggested), or a value does not fit.
    """
    data = parse_toml(read_text(path), StudyError, str(path))
    check_format("study", data.pop("format", "pipefit.study/1"), StudyError, str(path))
    study = study_of(data, str(path))
    if not {"grid", "trials", *_TRIAL} & data.keys():
        raise StudyError(f"{path}: it names nothing to train: expected model = …, a [grid], or [[trials]]")
    return study


def study_of(data: Values, where: str = "study") -> StudySpec:
    """A study from the data of its file.

    Raises:
        StudyError: with `where` and the key.
    """
    with at(where):
        _check_keys(data, (*_STUDY, "grid", "trials", *_TRIAL))
        trials = _trials(data)
        _check_different(trials)
        options = {key: data[key] for key in _STUDY if key in data}
        return spec_of(trials, {"output": f"runs/{data.get('name', 'study')}", **options})


def spec_of(trials: Sequence[Trial], options: Values) -> StudySpec:
    """A study of trials, with options by the names of a study file; None is the same as no value.

    Raises:
        PipefitError: an unknown option, or a value that does not fit.
    """
    _check_keys(options, _STUDY)
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(given.get("output"), Path):
        given["output"] = str(given["output"])
    stop = given.get("stop")
    if isinstance(stop, str):
        stop = {"rule": stop}
    if isinstance(stop, Mapping):
        given["stop"] = rule_of(stop)
    return StudySpec(tuple(trials), **given)


def grid(space: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of some keys, the last key fastest.

    >>> [point for point in grid({"lr": [0.1, 0.2], "batch": [8]})]
    [{'lr': 0.1, 'batch': 8}, {'lr': 0.2, 'batch': 8}]
    """
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


@at("stop")
def rule_of(data: Any) -> Rule:
    """A stopping rule from its table: `rule`, and the rule's own numbers.

    Raises:
        StudyError: an unknown rule or key, or a number that does not fit.
    """
    if not isinstance(data, Mapping) or "rule" not in data:
        raise StudyError(f"expected a table with rule = {' or '.join(map(repr, RULES))}")
    kind = look_up(data["rule"], RULES, "unknown rule", StudyError)
    numbers = {key: value for key, value in data.items() if key != "rule"}
    _check_keys(numbers, (f.name for f in fields(kind)))
    rule = kind(**numbers)
    check_fields(rule, StudyError)
    return rule


def _trials(data: Values) -> list[Trial]:
    shared = _flat({key: data[key] for key in _TRIAL if key in data})
    listed = data.get("trials", [{}])
    is_list = isinstance(listed, list) and len(listed) > 0
    if not is_list or not all(isinstance(item, dict) for item in listed):
        raise StudyError("trials: expected [[trials]] tables, one for each trial")
    space = {}
    if "grid" in data:
        space = _space(data["grid"])
    count = len(listed) * math.prod(map(len, space.values()))
    if count > MOST_TRIALS:
        raise StudyError(f"{count:,} trials are too many: a file may give {MOST_TRIALS:,}")
    found = []
    for index, own in enumerate(listed):
        with at(f"trials[{index}]") if "trials" in data else contextlib.nullcontext():
            _check_keys(own, ("name", *_TRIAL))
            found += [_trial(shared, _flat(own), point) for point in grid(space)]
    return found


def _flat(table: Values) -> dict[str, Any]:
    """A table with the options of the model by name, as "options.width", after all others."""
    options = table.get("options", {})
    if not isinstance(options, dict):
        raise StudyError(f"options: expected a table such as {{layers = 4}}, as in options.width = …, got {options!r}")
    others = {key: value for key, value in table.items() if key != "options"}
    return {**others, **{_OPTIONS + key: value for key, value in options.items()}}


@at("grid")
def _space(given: Any) -> dict[str, list[Any]]:
    """The lists of a grid."""
    if not isinstance(given, dict) or not given:
        raise StudyError(f"expected a table of lists, such as lr = [1e-3, 3e-4], got {given!r}")
    space = _flat(given)
    for key, values in space.items():
        head, dot, _ = key.partition(".")
        _check_keys([head], _TRIAL)
        if dot and not key.startswith(_OPTIONS):
            raise StudyError(f"{key}: options of the model are given by name, as in options.width = [64, 128]")
        if not isinstance(values, list) or not values:
            raise StudyError(f"{key}: expected a list of values, as in lr = [1e-3, 3e-4], got {values!r}")
    return space


def _check_different(trials: Iterable[Trial]) -> None:
    """Refuses a trial that is listed twice: it would give the same numbers twice."""
    seen: dict[str, str] = {}
    for number, trial in enumerate(trials):
        name = file_name(number, trial)
        training = {**trial.as_dict(), "name": "", "values": {}}
        before = seen.setdefault(repr(sorted(training.items())), name)
        if before != name:
            raise StudyError(f"{before} and {name} are the same training: change a value, or its seed")


def _trial(shared: Values, own: Values, point: Values) -> Trial:
    """A trial: the common settings, overridden by its own, and both by those of a point of the grid."""
    settings = {**shared, **own, **point}
    chosen = {**own, **point}
    values = {key.removeprefix(_OPTIONS): value for key, value in chosen.items() if key != "name"}
    options = {key.removeprefix(_OPTIONS): value for key, value in settings.items() if key.startswith(_OPTIONS)}
    fixed = {key: value for key, value in settings.items() if not key.startswith(_OPTIONS)}
    if fixed.get("name") and point:
        parts = (f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
        fixed["name"] = "-".join([str(fixed["name"]), *parts])
    if isinstance(fixed.get("data"), list):
        fixed["data"] = tuple(fixed["data"])
    return Trial(**fixed, options=options, values=values)


def _check_keys(given: Iterable[str], known: Iterable[str]) -> None:
    table = dict.fromkeys(known)
    for key in given:
        look_up(key, table, "unknown key", StudyError)
