"""Options from a TOML file: `--config run.toml`. Options on the command line have priority."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

from cyclopts.config import Dict

from pipefit.cli import train
from pipefit.errors import PipefitError, nearest
from pipefit.spec.files import check_format, parse_toml, read_text


def configuration(tokens: list[str]) -> Dict | None:
    """The options in the file that `--config` names; None without one.

    Keys are the long names of options.

    Raises:
        PipefitError: the file is missing or is not TOML, or a key is not an option; the nearest is suggested.
    """
    path = _path(tokens)
    if path is None or tokens[0] != "train":
        return None
    data = parse_toml(read_text(path), PipefitError, str(path))
    check_format("run", data.pop("format", "pipefit.run/1"), PipefitError, str(path))
    known = set(inspect.signature(train.command).parameters) - {"config", "json"}
    for key in data:
        if key.replace("-", "_") not in known:
            raise PipefitError(f"{path}: unknown option {key!r}; {nearest(key.replace('-', '_'), known)}")
    return Dict(
        {key.replace("_", "-"): _value(item, f"{path}: {key}") for key, item in data.items()},
        use_commands_as_keys=False,
        source=str(path),
    )


def _value(item: Any, where: str) -> Any:
    """A value as on the command line: numbers of a list with commas, words of a list one by one."""
    if isinstance(item, dict):
        raise PipefitError(f"{where}: expected a plain value, got a table; options are at the top level of the file")
    if isinstance(item, list):
        if all(isinstance(part, int) and not isinstance(part, bool) for part in item):
            return ",".join(map(str, item))
        return [str(part) for part in item]
    return item


def _path(tokens: list[str]) -> Path | None:
    for token, following in pairwise([*tokens, ""]):
        name, _, value = token.partition("=")
        if name == "--config" and (value or following):
            return Path(value or following)
    return None
