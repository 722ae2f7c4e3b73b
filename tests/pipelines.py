"""Pipelines of tests, which give options one by one where a `Pipeline` takes groups of them."""

from typing import Any

from pipefit.spec.options import Parallelism, Precision, Updates

_GROUPS = {"parallelism": Parallelism, "updates": Updates, "precision": Precision}
_NAMES = {name: group for group, kind in _GROUPS.items() for name in kind.__dataclass_fields__}


def grouped(**options: Any) -> dict[str, Any]:
    """A pipeline's arguments, with the options of its groups put into these."""
    tables: dict[str, dict[str, Any]] = {}
    arguments = {name: value for name, value in options.items() if name not in _NAMES}
    if "loss_scale" in options:
        tables["precision"] = {"dtype": arguments.pop("precision", "fp32")}
    for name, value in options.items():
        if name in _NAMES:
            tables.setdefault(_NAMES[name], {})[name] = value
    return arguments | {group: _GROUPS[group](**table) for group, table in tables.items()}
