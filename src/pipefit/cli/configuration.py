"""Options from a TOML file: `--config run.toml`. Options on the command line have priority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection

from pipefit.errors import PipefitError, nearest

_ONLY_TYPED = ("--config", "--json")


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Gives the arguments of a command the values of the file that `--config` names, if it does.

    Keys are the long names of options.

    Raises:
        PipefitError: the file is missing or is not TOML, or a key is not an option; the nearest is suggested.
    """
    named = {argument.name: argument for argument in arguments}
    if "--config" not in named or not named["--config"].tokens:
        return
    from cyclopts.config import Dict

    from pipefit.spec.files import check_format, parse_toml, read_text

    path = Path(named["--config"].tokens[0].value)
    data = parse_toml(read_text(path), PipefitError, str(path))
    check_format("run", data.pop("format", "pipefit.run/1"), PipefitError, str(path))
    known = [name.removeprefix("--").replace("-", "_") for name in named if name not in _ONLY_TYPED]
    values = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            raise PipefitError(f"{path}: unknown option {key!r}; {nearest(name, known)}")
        values[name.replace("_", "-")] = _value(value, f"{path}: {key}")
    Dict(values, use_commands_as_keys=False, source=str(path))(app, commands, arguments)


def _value(item: Any, where: str) -> Any:
    """A value as on the command line: numbers of a list with commas, words of a list one by one."""
    if isinstance(item, dict):
        raise PipefitError(f"{where}: expected a plain value, got a table; options are at the top level of the file")
    if not isinstance(item, list):
        return item
    words = list(map(str, item))
    if all(type(part) is int for part in item):
        return ",".join(words)
    return words
