"""The answer of a verb: data for programs, text for people, an exit code. Nothing else reaches standard output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINE, FINDING, USAGE, INTERNAL_ERROR = 0, 1, 2, 70
"""Exit codes: all is well; a finding (or a run that failed); bad input; a mistake of pipefit itself."""


@dataclass(frozen=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: the JSON object of `--json`.
        text: what is printed without it; a function where making the text costs something.
        code: exit code.
    """

    data: Mapping[str, Any]
    text: str | Callable[[], str]
    code: int = FINE

    def show(self, wants_json: bool) -> str:
        """The text for standard output."""
        if wants_json:
            return as_json(self.data)
        return self.text() if callable(self.text) else self.text


def as_json(data: Mapping[str, Any]) -> str:
    """One line of strict JSON: infinities and NaN, which JSON has no word for, become null."""
    return json.dumps(_plain(data), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__struct_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    return _plain(float(value))
