"""Pipelines and checks of tests, which give options one by one where the package takes groups of them."""

from typing import Any

from pipefit.spec.options import Parallelism, Precision, Request, Updates
from pipefit.testing.case import Case

_GROUPS = {"parallelism": Parallelism, "updates": Updates, "precision": Precision}
_NAMES = {name: group for group, kind in _GROUPS.items() for name in kind.__dataclass_fields__ if name != "dtype"}
_NUMBERS = {"num_microbatches": "microbatches", "num_chunks": "chunks"}


def grouped(**options: Any) -> dict[str, Any]:
    """The arguments of a pipeline or a check, with the options of groups put into these.

    Tests of shapes count: `num_ranks` (each of `tensor` processes), `num_microbatches`, `num_chunks`.
    """
    options = {_NUMBERS.get(name, name): value for name, value in options.items()}
    if "num_ranks" in options:
        options["ranks"] = options.pop("num_ranks") * options.get("tensor", 1)
    tables: dict[str, dict[str, Any]] = {}
    arguments = {name: value for name, value in options.items() if name not in _NAMES}
    if {"loss_scale", "compile"} & options.keys():
        tables["precision"] = {"dtype": arguments.pop("precision", "fp32")}
    for name, value in options.items():
        if name in _NAMES:
            tables.setdefault(_NAMES[name], {})[name] = value
    return arguments | {group: _GROUPS[group](**table) for group, table in tables.items()}


def case_of(**options: Any) -> Case:
    """A case of a check, from the same options."""
    given = grouped(**options)
    request = {name: given.pop(name) for name in ("schedule", "microbatches", "parallelism") if name in given}
    return Case(request=Request(**request), **given | {"precision": Precision.of(given.get("precision", "fp32"))})
